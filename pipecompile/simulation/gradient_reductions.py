"""Reductions of gradients among copies of a pipeline, beside the backwards that are still running.

device 0   2B2  2B3  0B2  0B3
reduces             [stage 2 ──────]  [stage 0]        one after the other, each once the last backward of its stage is over
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pipecompile.simulation.task_graph import TaskGraph, Times

__all__ = ["last_ends", "reduced_makespan"]


def last_ends(tasks: TaskGraph, times: Times) -> dict[int, float]:
    """Return, per stage, the seconds at which its last action ends."""
    ends: dict[int, float] = {}
    for action, end in zip(tasks.actions, times.end, strict=True):
        if action is not None:
            ends[action.stage] = max(ends.get(action.stage, 0.0), end)
    return ends


def reduced_makespan(ends: Mapping[int, float], placement: Sequence[int], seconds: Sequence[float]) -> float:
    """Return the seconds at which all devices have reduced the gradients of their stages.

    `ends` has the seconds at which the gradients of each stage are complete, `seconds` those of its reduction. A device reduces its
    stages one after the other, in the order in which they are complete.
    """
    free = dict.fromkeys(placement, 0.0)
    for stage in sorted(ends, key=ends.__getitem__):
        device = placement[stage]
        free[device] = max(free[device], ends[stage]) + seconds[stage]
    return max(free.values(), default=0.0)
