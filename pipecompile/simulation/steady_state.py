"""Simulation of periodic schedules: a few repetitions, until each takes as long as the one before, and the rest by multiplication.

    repetition    0      1      2      3    ...         from a repetition on, all its times are those of the one before, T later:
    times         x      x+9    x+18   x+27             then all later ones are too, and the epilogue comes T later per repetition

A time is the latest of other times, each plus a constant: a max-plus linear system. If the times of as many repetitions as an action
looks back are all those of c repetitions earlier plus T, so are the next, by induction (Baccelli et al., "Synchronization and
Linearity", 1992, section 3.7). Links are part of it, each serves its messages in the order of one row. Hosts that launch, shared
streams and engines per device are not: their schedules are simulated in full.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Unpack

from pipecompile.errors import InputError
from pipecompile.ir import Route
from pipecompile.ir.periodic import PeriodicSchedule
from pipecompile.ir.timeline import Timeline
from pipecompile.simulation.costs import CostOptions
from pipecompile.simulation.simulator import build_tasks, run_to_end, simulate
from pipecompile.simulation.task_graph import TaskGraph, Times

__all__ = ["SteadyState", "simulate_periodic"]

_FEW = 6
"""Repetitions that are simulated first; twice as many as long as there is no steady state."""

_LONGEST_CYCLE = 4
"""Repetitions after which times have to recur. Schedules of the catalogue need one, two at odd costs."""

_EQUAL = 1e-12
"""Relative tolerance for equal differences of times: rounding alone."""


@dataclass(frozen=True, slots=True)
class SteadyState:
    """The run of a periodic schedule.

    `makespan` is in seconds, `period` the seconds of a repetition in the steady state (None if all were simulated), `simulated` the
    number of repetitions of which `timeline` has the spans. `peak_memory` (bytes) and `peak_in_flight` are per device, of the whole run.
    """

    makespan: float
    period: float | None
    simulated: int
    bubble: float
    peak_memory: tuple[float, ...]
    peak_in_flight: tuple[float, ...]
    timeline: Timeline


def simulate_periodic(
    schedule: PeriodicSchedule, *, routes: Sequence[Route] | None = None, **costs: Unpack[CostOptions]
) -> SteadyState:
    """Return the predicted run of a periodic schedule under the costs of `simulate`: the same times, without simulating them all.

    Raise InputError for what is no periodic schedule and for wrong costs, VerifyError if it is not legal.
    """
    if not isinstance(schedule, PeriodicSchedule):
        raise InputError(f"a {type(schedule).__name__} is no PeriodicSchedule", hint='build_periodic("1f1b", 8, 4096)')
    count = _FEW
    while count < schedule.repetitions:
        subject = schedule.unrolled(count)
        tasks, checked = build_tasks(subject, routes, **costs)
        if tasks.issued or tasks.after or checked.engines.value != "pair":
            break
        times = run_to_end(subject, tasks, checked)
        if (steady := _steady(schedule, count, tasks, times)) is not None:
            cycle, seconds = steady
            if rest := (schedule.repetitions - count) % cycle:
                count += rest
                continue
            return _extended(schedule, count, seconds / cycle, routes, costs)
        count *= 2
    return _extended(schedule, schedule.repetitions, None, routes, costs)


def _extended(
    schedule: PeriodicSchedule, count: int, period: float | None, routes: Sequence[Route] | None, costs: CostOptions
) -> SteadyState:
    """Return the run of which `count` repetitions are simulated and the rest takes `period` seconds each."""
    timeline = simulate(schedule.unrolled(count), routes=routes, **costs)
    more = schedule.repetitions - count
    makespan = timeline.makespan + more * (period or 0.0)
    busy = timeline.busy
    if more:
        busy += more * (busy - simulate(schedule.unrolled(count - 1), routes=routes, **costs).busy)
    bubble = 1.0 - busy / (schedule.n_devices * makespan) if makespan else 0.0
    return SteadyState(makespan, period, count, bubble, timeline.peak_memory, timeline.peak_in_flight, timeline)


def _steady(schedule: PeriodicSchedule, count: int, tasks: TaskGraph, times: Times) -> tuple[int, float] | None:
    """Return after how many repetitions all times recur, and how many seconds later; None if they do not within `count`."""
    reach = _reach(tasks, _repetition_of_tasks(schedule, count, tasks), count)
    if reach is None:
        return None
    vectors = [_times(_own(schedule, tasks, index), tasks, times) for index in range(count)]
    for cycle in range(1, min(_LONGEST_CYCLE, count - reach) + 1):
        first = count - cycle - reach
        shift = vectors[first + cycle][0] - vectors[first][0]
        pairs = ((vectors[index], vectors[index + cycle]) for index in range(first, count - cycle))
        if all(_is_later(before, after, shift, _EQUAL * times.makespan) for before, after in pairs):
            return cycle, shift
    return None


def _is_later(before: Sequence[float], after: Sequence[float], shift: float, tolerance: float) -> bool:
    """Return whether all times are `shift` seconds later."""
    return all(abs(b - a - shift) <= tolerance for a, b in zip(before, after, strict=True))


def _times(own: Sequence[tuple[int, int]], tasks: TaskGraph, times: Times) -> list[float]:
    """Return the ends of the tasks of a repetition, and of the messages that they send."""
    numbers = [task for first, size in own for task in range(first, first + size)]
    messages = (message for task in numbers for message in tasks.sends[task])
    return [*(times.end[task] for task in numbers), *(times.message_end[message] for message in messages)]


def _own(schedule: PeriodicSchedule, tasks: TaskGraph, index: int) -> list[tuple[int, int]]:
    """Return, per device, the first task of a repetition and the number of its tasks."""
    return [
        (row.start + len(prologue) + index * len(period), len(period))
        for row, prologue, period in zip(tasks.rows, schedule.prologue, schedule.period, strict=True)
    ]


def _repetition_of_tasks(schedule: PeriodicSchedule, count: int, tasks: TaskGraph) -> list[int]:
    """Return the repetition of each task: -1 in the prologue, `count` in the epilogue."""
    found: list[int] = []
    for prologue, period, row in zip(schedule.prologue, schedule.period, tasks.rows, strict=True):
        found += [-1] * len(prologue)
        for index in range(count):
            found += [index] * len(period)
        found += [count] * (len(row) - len(prologue) - count * len(period))
    return found


def _reach(tasks: TaskGraph, repetition: Sequence[int], count: int) -> int | None:
    """Return how many repetitions an action looks back at most; None if one needs a later part, or the epilogue the prologue."""
    sender = {message: task for task, sent in enumerate(tasks.sends) for message in sent}
    reach = 1
    for task, needs in enumerate(tasks.needs):
        here = repetition[task]
        for message in needs:
            source = repetition[sender[message]]
            if source > here or (here == count and source < 0):
                return None
            if here >= 0 and source >= 0:
                reach = max(reach, here - source)
    return reach
