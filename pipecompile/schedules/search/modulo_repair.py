"""Repair of modulo schedules that exceed the memory as they run, though not as they are planned.

    planned     F1 begins when stage 3 has freed its memory        a value arrives when the plan has room for it
    as it runs  F1 begins as soon as its device is free            the value arrives earlier, beside what stage 3 holds

Delays change the order of the actions on each device, and only the order decides when they run. So delays are changed at random, and
each schedule is simulated, until one fits; the period grows if none does. A simulation takes as long as hundreds of placements: the
budget permits few, which is enough where little memory is missing.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, inf

from pipecompile.ir import Schedule
from pipecompile.schedules.search.list_search import EvaluatedSchedule
from pipecompile.schedules.search.modulo_schedule import ModuloSchedule
from pipecompile.schedules.search.modulo_search import ModuloSearch

__all__ = ["repaired"]

_PERIODS = 1.0, 1.02, 1.05, 1.1, 1.2
"""Factors on the shortest period that fits as planned."""

_SIMULATION = 6
"""Placements of an action that take as long as its simulation."""

_MAX_FAILURES = 100
"""Changes of the delays without progress after which a longer period is tried."""


@dataclass(frozen=True, slots=True)
class _Trial:
    """Delays, the schedule that they give, and its score: the missing memory as shares of that of the devices, then the seconds."""

    delays: tuple[float, ...]
    schedule: Schedule | None
    score: tuple[float, float]


def repaired(search: ModuloSearch, budget: float) -> EvaluatedSchedule | None:
    """Return a schedule that fits as it runs, of the first of `_PERIODS` for which one is found, the fastest; None if none is found."""
    search.capacity = search.evaluator.capacity
    first, left = search.undelayed().placed, budget
    if first is None:
        return None
    for factor in _PERIODS:
        best, spent = _best_trial(search, first.period * factor, left / 2)
        left -= spent
        if best.schedule is not None and best.score[0] == 0 and not any(search.evaluator.excess(best.schedule)):
            return EvaluatedSchedule(best.score[1], best.schedule, search.evaluator)
    return None


def _best_trial(search: ModuloSearch, period: float, budget: float) -> tuple[_Trial, float]:
    """Return the trial with the least score of those with this period, and what all of them take of the budget."""
    best, spent = _tried(search, period, search.no_delays)
    failures = 0
    while failures < _MAX_FAILURES and spent < budget and search.goes_on():
        trial, cost = _tried(search, period, search.changed(best.delays))
        spent += cost
        failures = failures + 1 if trial.score >= best.score else 0
        best = min(best, trial, key=lambda each: each.score)
    return best, spent


def _tried(search: ModuloSearch, period: float, delays: tuple[float, ...]) -> tuple[_Trial, float]:
    """Return the trial of these delays, without a schedule if it does not fit as planned, and what it takes of the budget."""
    attempt = search.attempt(period, delays)
    if attempt.placed is None or attempt.score[0] > 0:
        return _Trial(delays, None, (inf, attempt.score[0])), search.actions
    count = _enough_microbatches(attempt.placed, search.m)
    few = attempt.placed.schedule(search.workload, count)
    shares = zip(search.evaluator.excess(few), search.evaluator.capacity, strict=True)
    missing = sum(over / most for over, most in shares if over)
    schedule = few if count == search.m else attempt.placed.schedule(search.workload, search.m)
    seconds = search.evaluator.seconds(schedule)
    return _Trial(delays, schedule, (missing, seconds)), search.actions * (1 + _SIMULATION * count)


def _enough_microbatches(placed: ModuloSchedule, most: int) -> int:
    """Return how many micro-batches show the memory of the steady state: those in flight, and as many again."""
    return min(most, 2 + 2 * ceil(placed.span / placed.period))
