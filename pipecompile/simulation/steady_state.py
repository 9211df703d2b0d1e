"""Simulation of periodic schedules: a few repetitions, until each takes as long as the one before, and the rest by multiplication.

    repetition    0      1      2      3    ...         from a repetition on, all its times are those of the one before, T later:
    times         x      x+9    x+18   x+27             then all later ones are too, and the epilogue comes T later per repetition

A time is the latest of other times, each plus a constant: a max-plus linear system. If the times of as many repetitions as an
action looks back are all those of c repetitions earlier plus T, so are the next, by induction (Baccelli et al., "Synchronization
and Linearity", 1992, section 3.7). Links are part of it, each serves its messages in the order of one row. Hosts that launch,
shared streams, engines per device and copies to and from the host that take time are not: their schedules are simulated in full.
The repetitions are walked by arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Unpack

import numpy as np

from pipecompile.ir import SHARDING, Kind, Route
from pipecompile.ir.in_flight import in_flight
from pipecompile.ir.periodic import PeriodicSchedule
from pipecompile.ir.timeline import Timeline
from pipecompile.simulation.array_memory import peak_bytes
from pipecompile.simulation.array_walk import ArrayRun, ScheduleArrays
from pipecompile.simulation.costs import CostOptions, Costs, Engines, make_costs
from pipecompile.simulation.simulator import simulate
from pipecompile.text.input_checks import check_kind
from pipecompile.verifiers import verify
from pipecompile.verifiers.routes import route_sequence

__all__ = ["SteadyState", "simulate_periodic"]

_FEW = 6
"""Repetitions that are simulated first; twice as many as long as there is no steady state."""

_MOST_SPANS = 20_000
"""Actions of the simulated repetitions up to which the result has a timeline."""

_EQUAL = 1e-12
"""Relative tolerance for equal differences of times: rounding alone."""


@dataclass(frozen=True, slots=True)
class SteadyState:
    """The run of a periodic schedule.

    `makespan` is in seconds, `period` the seconds of a repetition in the steady state (None if all were simulated), `simulated` the
    number of repetitions that were simulated. `timeline` has their spans; None if they have more than 20,000 actions. `peak_memory`
    (bytes) and `peak_in_flight` are per device, of the whole run.
    """

    makespan: float
    period: float | None
    simulated: int
    bubble: float
    peak_memory: tuple[float, ...]
    peak_in_flight: tuple[float, ...]
    timeline: Timeline | None


def simulate_periodic(
    schedule: PeriodicSchedule, *, routes: Sequence[Route] | None = None, **costs: Unpack[CostOptions]
) -> SteadyState:
    """Return the predicted run of a periodic schedule under the costs of `simulate`: the same times, without simulating them all.

    Raise InputError if `schedule` is not a PeriodicSchedule or a cost is wrong, VerifyError if the schedule is not legal.
    """
    check_kind(schedule, PeriodicSchedule, 'pc.build_periodic("1f1b", 8, 4096)')
    verify(schedule, routes=routes)
    routes = route_sequence(routes, schedule.n_stages)
    checked = make_costs(schedule.n_stages, schedule.n_devices, routes, **costs)
    if _is_beside(schedule, checked):
        return _simulated(schedule, schedule.repetitions, None, routes, costs)
    arrays, count, steady = ScheduleArrays(schedule, routes, checked), min(_FEW, schedule.repetitions), None
    while True:
        run = arrays.run(count)
        if count == schedule.repetitions or (steady := _steady(run, count)) is not None:
            rest = (schedule.repetitions - count) % steady[0] if steady else 0
            if not rest:
                break
            count += rest
        else:
            count = min(2 * count, schedule.repetitions)
    period = steady[1] / steady[0] if steady and count < schedule.repetitions else None
    if len(run.end) <= _MOST_SPANS:
        return _simulated(schedule, count, period, routes, costs)
    return _of_arrays(schedule, run, count, period, checked)


def _is_beside(schedule: PeriodicSchedule, costs: Costs) -> bool:
    """Return whether something takes time beside the devices and their links, which arrays do not simulate."""
    kinds = schedule.kinds
    is_copied = Kind.OFFLOAD in kinds and costs.offload
    is_shared = costs.engines is not Engines.PAIR or costs.streams
    return bool(any(costs.launch) or is_shared or costs.has_input_seconds or is_copied or kinds & {*SHARDING})


def _simulated(
    schedule: PeriodicSchedule, count: int, period: float | None, routes: Sequence[Route], costs: CostOptions
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


def _of_arrays(
    schedule: PeriodicSchedule, run: ArrayRun, count: int, period: float | None, costs: Costs
) -> SteadyState:
    """Return the same, of a run that is too large for a timeline."""
    more = schedule.repetitions - count
    makespan = run.makespan + more * (period or 0.0)
    busy = float(run.seconds.sum()) + more * float(run.seconds[run.repetition == count - 1].sum())
    few = schedule.unrolled(min(2, schedule.repetitions))
    flying = in_flight(few.rows, few.placement)
    return SteadyState(
        makespan, period, count, 1.0 - busy / (schedule.n_devices * makespan) if makespan else 0.0,
        peak_bytes(run, schedule.placement, costs), flying, None,
    )  # fmt: skip


def _steady(run: ArrayRun, count: int) -> tuple[int, float] | None:
    """Return after how many repetitions all times recur, and how many seconds later; None if they do not within `count`."""
    reach = _reach(run, count)
    if reach is None:
        return None
    own = run.repetition >= 0
    own &= run.repetition < count
    ends, arrivals = run.end[own], run.arrival[run.sends[own]]
    arrivals[run.sends[own] == len(run.arrival) - 1] = np.nan
    order = np.argsort(run.repetition[own], kind="stable")
    times = np.concatenate([ends[order].reshape(count, -1), arrivals[order].reshape(count, -1)], axis=1)
    times = times[:, ~np.isnan(times[0])]
    tolerance = _EQUAL * run.makespan
    for cycle in range(1, count - reach + 1):
        first = count - cycle - reach
        later = times[first + cycle :] - times[first : count - cycle]
        if (abs(later - later[0, 0]) <= tolerance).all():
            return cycle, float(later[0, 0])
    return None


def _reach(run: ArrayRun, count: int) -> int | None:
    """Return how many repetitions an action looks back at most; None if one needs a later part, or the epilogue the prologue."""
    none = len(run.arrival) - 1
    sent_in = np.full(none + 1, -1)
    for column in run.sends.T:
        sent_in[column] = run.repetition
    reach = 1
    for column in run.needs.T:
        is_needed = column < none
        here, source = run.repetition[is_needed], sent_in[column[is_needed]]
        if (source > here).any() or ((here == count) & (source < 0)).any():
            return None
        within = source >= 0
        reach = max(reach, int((here - source)[within].max(initial=1)))
    return reach
