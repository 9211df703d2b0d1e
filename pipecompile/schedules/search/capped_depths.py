"""Schedules of the catalogue with fewer micro-batches in flight: as many on each device as its memory has room for.

    device 0   F0 F1 F2 B0 F3 B1 ...     1f1b, which does not fit
    device 0   F0 F1 B0 F2 B1 F3 ...     at most 2 in flight: forwards wait until a backward has made room, in their order
    device 0   F0 B0 F1 B1 F2 B2 ...     at most 1: one micro-batch after another

Between the schedules of the catalogue and one micro-batch after another there is one for each number per device. First one number for
all devices is raised, then that of each device, as long as the schedule fits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from math import inf

from pipecompile.ir import Action, Kind, Schedule
from pipecompile.passes.checkpointing import insert_recompute
from pipecompile.schedules.search.evaluate import Evaluator
from pipecompile.schedules.search.list_search import EvaluatedSchedule

__all__ = ["capped", "capped_candidates", "deepest_fitting"]

_BASES = ("1f1b", "interleaved")
"""The schedules of the catalogue that are capped: the first that there is. Of divided backwards, a forward that waits would be overtaken
by its own.
"""

_MAX_CELLS = 2_000
"""Stages times micro-batches up to which caps are tried: each takes a simulation, of which there are up to some hundred."""


def capped_candidates(
    evaluator: Evaluator, schedules: Iterable[Schedule], flag_sets: Iterable[tuple[bool, ...]]
) -> Iterator[EvaluatedSchedule]:
    """Yield one of the schedules, which have the placement of the evaluator and do not fit, capped: once per set of recomputed stages with
    which it fits so.
    """
    base = next((one for name in _BASES for one in schedules if one.name == name), None)
    if base is None or base.n_stages * base.n_microbatches > _MAX_CELLS:
        return

    def fits(schedule: Schedule) -> bool:
        return evaluator.seconds(schedule) < inf and not any(evaluator.excess(schedule))

    for flags in flag_sets:
        if (deepest := deepest_fitting(insert_recompute(base, flags), fits)) is not None:
            yield EvaluatedSchedule(evaluator.seconds(deepest), deepest, evaluator)


def capped(schedule: Schedule, caps: Sequence[int]) -> Schedule:
    """Return the schedule with at most `caps[d]` micro-batches of a stage in flight on device d; forwards that have to wait keep their order.

    A device that waits for more forwards than the one before it may make is in a deadlock: its simulation has no end.
    """
    rows = tuple(tuple(_capped_row(row, cap)) for row, cap in zip(schedule.rows, caps, strict=True))
    return replace(schedule, rows=rows, certificate=None)


def _capped_row(row: Sequence[Action], cap: int) -> Iterator[Action]:
    in_flight: dict[int, int] = {}
    waiting = deque[Action]()
    for action in row:
        if action.kind is Kind.FORWARD:
            waiting.append(action)
        else:
            yield action
            in_flight[action.stage] = in_flight.get(action.stage, 0) - (action.kind is Kind.BACKWARD)
        while waiting and in_flight.get(waiting[0].stage, 0) < cap:
            first = waiting.popleft()
            in_flight[first.stage] = in_flight.get(first.stage, 0) + 1
            yield first
    yield from waiting


def deepest_fitting(schedule: Schedule, fits: Callable[[Schedule], bool]) -> Schedule | None:
    """Return the schedule with caps that were raised from 1 as long as it fits; None if it does not fit with 1 everywhere."""
    caps = [1] * schedule.n_devices
    best = capped(schedule, caps)
    if not fits(best):
        return None
    for cap in range(2, schedule.n_microbatches + 1):
        deeper = capped(schedule, [cap] * schedule.n_devices)
        if deeper.rows == best.rows or not fits(deeper):
            break
        best, caps = deeper, [cap] * schedule.n_devices
    raised = True
    while raised:
        raised = False
        for device in range(schedule.n_devices):
            more = [cap + (number == device) for number, cap in enumerate(caps)]
            deeper = capped(schedule, more)
            if deeper.rows != best.rows and fits(deeper):
                best, caps, raised = deeper, more, True
    return best
