"""Reductions of gradients among copies of a pipeline, beside the backwards that are still running.

device 0   2B2  2B3  0B2  0B3
reduces             [stage 2 ──────]  [stage 0]        one after the other, each once the last backward of its stage is over
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain

from pipecompile.ir import Kind
from pipecompile.simulation.task_graph import TaskGraph, Times

__all__ = ["gradient_ends", "last_ends", "optimizer_times", "reduced_makespan", "reduction_times", "row_ends"]


def last_ends(tasks: TaskGraph, times: Times) -> dict[int, float]:
    """Return, per stage, the seconds at which its last action ends."""
    ends: dict[int, float] = {}
    for action, end in zip(tasks.actions, times.end, strict=True):
        if action is not None:
            ends[action.stage] = max(ends.get(action.stage, 0.0), end)
    return ends


def gradient_ends(tasks: TaskGraph, times: Times) -> dict[int, float]:
    """Return, per stage, the seconds at which its last action ends, and with it the collective that REDUCE_GRAD begins."""
    ends = last_ends(tasks, times)
    for action, sent in zip(tasks.actions, tasks.sends, strict=True):
        if action is not None and action.kind is Kind.REDUCE_GRAD:
            ends[action.stage] = max([ends[action.stage], *(times.message_end[message] for message in sent)])
    return ends


def row_ends(tasks: TaskGraph, times: Times) -> list[float]:
    """Return, per device, the seconds at which its row ends: with its last action, or with the gradients of ties that it waits for."""
    return [times.end[row.stop - 1] if row else 0.0 for row in tasks.rows]


def reduced_makespan(ends: Mapping[int, float], placement: Sequence[int], seconds: Sequence[float]) -> float:
    """Return the seconds at which all devices have reduced the gradients of their stages.

    `ends` has the seconds at which the gradients of each stage are complete, `seconds` those of its reduction. A device reduces its
    stages one after the other, in the order in which they are complete.
    """
    homes = [(device,) for device in placement]
    return max((end for _, end in reduction_times(ends, homes, seconds).values()), default=0.0)


def reduction_times(
    ends: Mapping[int, float], homes: Sequence[Sequence[int]], seconds: Sequence[float]
) -> dict[int, tuple[float, float]]:
    """Return, per stage, the seconds at which its reduction begins and ends, in the order of their begin on each device. `homes` has
    the devices of each stage: those of all copies reduce together.
    """
    free = dict.fromkeys(chain.from_iterable(homes), 0.0)
    times = {}
    for stage in sorted(ends, key=ends.__getitem__):
        own = homes[stage]
        begin = max(ends[stage], *(free[device] for device in own))
        times[stage] = begin, begin + seconds[stage]
        free |= dict.fromkeys(own, begin + seconds[stage])
    return times


def optimizer_times(
    reduced: Mapping[int, tuple[float, float]],
    row_ends: Sequence[float],
    homes: Sequence[Sequence[int]],
    seconds: Sequence[float],
) -> dict[tuple[int, int], tuple[float, float]]:
    """Return, by stage and device, the seconds at which its optimizer step begins and ends. Each copy of a stage has one.

    A device steps its stages one after the other, each once its gradients are reduced, and none before its row ends: `row_ends` has
    the seconds of that per device.
    """
    free = list(row_ends)
    times = {}
    for stage, (_, end) in reduced.items():
        for device in homes[stage]:
            begin = max(free[device], end)
            free[device] = begin + seconds[stage]
            times[stage, device] = begin, free[device]
    return times
