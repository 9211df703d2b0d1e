"""Reductions of gradients among copies of a pipeline, beside the backwards that are still running.

device 0   2B2  2B3  0B2  0B3
reduces             [stage 2 ──────]  [stage 0]        one after the other, each once the last backward of its stage is over
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pipecompile.simulation.task_graph import TaskGraph, Times

__all__ = ["last_ends", "optimizer_times", "reduced_makespan", "reduction_times"]


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
    return max((end for _, end in reduction_times(ends, placement, seconds).values()), default=0.0)


def reduction_times(
    ends: Mapping[int, float], placement: Sequence[int], seconds: Sequence[float]
) -> dict[int, tuple[float, float]]:
    """Return, per stage, the seconds at which its reduction begins and ends, in the order of their begin on each device."""
    free = dict.fromkeys(placement, 0.0)
    times = {}
    for stage in sorted(ends, key=ends.__getitem__):
        device = placement[stage]
        begin = max(free[device], ends[stage])
        free[device] = begin + seconds[stage]
        times[stage] = begin, free[device]
    return times


def optimizer_times(
    reduced: Mapping[int, tuple[float, float]],
    ends: Mapping[int, float],
    placement: Sequence[int],
    seconds: Sequence[float],
) -> dict[int, tuple[float, float]]:
    """Return, per stage, the seconds at which its optimizer step begins and ends.

    A device steps its stages one after the other, each once its gradients are reduced, and none before its last action: `ends` has that
    of each stage.
    """
    free = dict.fromkeys(placement, 0.0)
    for stage, end in ends.items():
        free[placement[stage]] = max(free[placement[stage]], end)
    times = {}
    for stage, (_, end) in reduced.items():
        device = placement[stage]
        begin = max(free[device], end)
        free[device] = begin + seconds[stage]
        times[stage] = begin, free[device]
    return times
