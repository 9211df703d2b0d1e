"""Search over modulo schedules: the shortest period whose memory fits.

    shortest period that fits without delays ──► a little shorter ──► delays at random until it fits ──► shorter again ...

A delay lets an action leave room for another, or a forward start later, so that its memory is held for less time. The random numbers are
the same in every run. The schedule of all micro-batches has the rows of the steady state, and the simulator runs each action of it
as early as possible.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from random import Random

from pipecompile.schedules.search.evaluate import Evaluator
from pipecompile.schedules.search.list_search import EvaluatedSchedule
from pipecompile.schedules.search.modulo_memory import memory_excess
from pipecompile.schedules.search.modulo_schedule import ModuloPlacer, ModuloSchedule
from pipecompile.schedules.search.workload import Workload, value_bytes, without_values

__all__ = ["ModuloSearch"]

_LONGER, _SHORTER = 1.05, 0.99
"""Factors on the period, before one that fits is known and after."""

_MAX_FAILURES = 300
"""Changes of the delays without progress after which they are given up."""

_SHARES = (0.6, 0.2, 0.2)
"""Shares of the budget: for the first search, and for those with a smaller capacity, if the simulated schedules exceed the memory."""

_FINALISTS = 10
"""Modulo schedules that are simulated with all micro-batches: a longer period may fill and drain faster."""

_RESTARTS = 0.2
"""Share of the attempts that begin without delays, and not with those of the one before, whether it fits or not."""


@dataclass(frozen=True, slots=True)
class DelayedSchedule:
    """Delays, the modulo schedule that they give, and its score: the excess of memory, then the seconds of a micro-batch."""

    delays: tuple[float, ...]
    placed: ModuloSchedule | None
    score: tuple[float, float]


class ModuloSearch:
    """Budgeted search for the modulo schedule of a workload that takes the least time for all micro-batches.

    Budgets are numbers of placed actions. `goes_on` says whether the time permits another attempt. Plans have the buffers of `values`
    where they are, or memory on each device for those of its stage with the most: more room than a plan needs, and for delays in the run.
    """

    def __init__(
        self,
        evaluator: Evaluator,
        workload: Workload,
        n_microbatches: int,
        goes_on: Callable[[], bool],
        *,
        values: bool = True,
    ) -> None:
        self.evaluator, self.workload, self.m, self.goes_on = evaluator, workload, n_microbatches, goes_on
        self.placer, self.rng = ModuloPlacer(workload), Random(0)
        self.actions = sum(2 + workload.split + flag for flag in workload.is_recomputed)
        self.planned, self.capacity = (workload, evaluator.capacity) if values else reserved(evaluator, workload)

    def run(self, budget: float) -> EvaluatedSchedule | None:
        """Return the best schedule that is found and fits; None if none is."""
        for share in _SHARES:
            finalists = self._simulated(self._fitting(budget * share))
            excesses = []
            for finalist in finalists:
                excesses.append(self.evaluator.excess(finalist.schedule))
                if not any(excesses[-1]):
                    return finalist
            if not excesses or not self.goes_on():
                break
            self.capacity = tuple(most - over for most, over in zip(self.capacity, excesses[0], strict=True))
        return None

    def planned_seconds(self) -> float:
        """Return the seconds of all micro-batches with the shortest period that fits without delays; infinite if none fits."""
        placed = self.undelayed().placed
        return (self.m - 1) * placed.period + placed.span if placed else inf

    def _simulated(self, found: Sequence[ModuloSchedule]) -> list[EvaluatedSchedule]:
        """Return the schedules of all micro-batches of those with the shortest periods, the fastest first."""
        simulated: list[EvaluatedSchedule] = []
        for placed in reversed(found[-_FINALISTS:]):
            if not simulated or self.goes_on():
                schedule = placed.schedule(self.workload, self.m)
                simulated.append(EvaluatedSchedule(self.evaluator.seconds(schedule), schedule, self.evaluator))
        return sorted(simulated, key=lambda each: each.seconds)

    def _fitting(self, budget: float) -> list[ModuloSchedule]:
        """Return modulo schedules that fit, each with a shorter period than the one before."""
        first = self.undelayed()
        found, left, delays = [first.placed] if first.placed else [], int(budget / self.actions), first.delays
        least = self._least_period()
        while found and found[-1].period > least and left > 0 and self.goes_on():
            period = max(least, found[-1].period * _SHORTER)
            if self.rng.random() < _RESTARTS:
                delays = self.no_delays
            attempt, used = self._fitted(period, delays, left)
            left, delays = left - used, attempt.delays
            found += [attempt.placed] if attempt.placed else []
        return found

    def undelayed(self) -> DelayedSchedule:
        """Return the attempt with the shortest period that fits without delays, in steps of `_LONGER`; no schedule if none does."""
        none = self.no_delays
        period, longest = self._least_period(), 2 * _serial_seconds(self.workload)
        while period <= longest:
            attempt = self.attempt(period, none)
            if attempt.score[0] == 0:
                return attempt
            period *= _LONGER
        return DelayedSchedule(none, None, (inf, inf))

    def _fitted(self, period: float, delays: tuple[float, ...], most: int) -> tuple[DelayedSchedule, int]:
        """Return the attempt that fits in this period, without a schedule if none is found, and the number of those made."""
        best, failures, count = self.attempt(period, delays), 0, 1
        while best.score[0] > 0 and failures < _MAX_FAILURES and count < most and self.goes_on():
            attempt = self.attempt(period, self.changed(best.delays))
            count, failures = count + 1, failures + 1
            if attempt.score <= best.score:
                failures *= attempt.score == best.score
                best = attempt
        return best if best.score[0] == 0 else DelayedSchedule(best.delays, None, best.score), count

    @property
    def no_delays(self) -> tuple[float, ...]:
        """The delays of a schedule without any."""
        return (0.0,) * self.placer.n_delays

    def changed(self, delays: Sequence[float]) -> tuple[float, ...]:
        """Return the delays with up to three of them changed."""
        changed, mean = list(delays), sum(self.workload.forward) / self.workload.n_stages
        for _ in range(self.rng.randint(1, 3)):
            index = self.rng.randrange(len(changed))
            more = self.rng.uniform(-1, 1.5) * mean
            changed[index] = 0.0 if self.rng.random() < 0.3 else max(0.0, changed[index] + more)
        return tuple(changed)

    def attempt(self, period: float, delays: tuple[float, ...]) -> DelayedSchedule:
        """Return the schedule with these delays, and its score; no schedule if a device has no room for an action."""
        placed = self.placer.place(period, delays)
        if placed is None:
            return DelayedSchedule(delays, None, (inf, inf))
        return DelayedSchedule(delays, placed, (memory_excess(placed, self.planned, self.capacity), placed.span))

    def _least_period(self) -> float:
        """Return the seconds of a micro-batch on the busiest device."""
        busy = [0.0] * self.workload.n_devices
        for s, seconds in enumerate(_seconds_of_stages(self.workload)):
            busy[self.workload.placement[s]] += seconds
        return max(*busy, 1e-12)


def _seconds_of_stages(workload: Workload) -> list[float]:
    """Return the seconds of all actions of a micro-batch, per stage."""
    backward = workload.input_grad if workload.split else workload.backward
    weight = workload.weight_grad if workload.split else (0.0,) * workload.n_stages
    again = [seconds * flag for seconds, flag in zip(workload.recompute, workload.is_recomputed, strict=True)]
    return [sum(parts) for parts in zip(workload.forward, again, backward, weight, strict=True)]


def _serial_seconds(workload: Workload) -> float:
    """Return the seconds of one micro-batch alone, with each transfer after the other."""
    transfers = (*workload.forward_transfers, *workload.gradient_transfers)
    return sum(_seconds_of_stages(workload)) + sum(each.seconds for sent in transfers for each in sent)


def reserved(evaluator: Evaluator, workload: Workload) -> tuple[Workload, tuple[float, ...]]:
    """Return the workload without the bytes of values, and what each device has beside those of its stage with the most."""
    values = value_bytes(workload)
    capacity = (
        most - max(size for size, home in zip(values, workload.placement, strict=True) if home == device)
        for device, most in enumerate(evaluator.capacity)
    )
    return without_values(workload), tuple(capacity)
