"""Search over list schedules of one placement and one choice of recomputed stages.

    priority rules ──► list schedules ──► finalists ──► correct the memory ──► best ──► hill climbing from the best rule

A list schedule bounds only what stages save. If the schedule exceeds the limit together with the buffers of its values, the
capacity is reduced by the bytes of those buffers, and the finalists are scheduled again.

Hill climbing changes a rule a little at random and keeps a change that is no slower. Under tight memory the quotas of forwards
in flight matter most, and no formula for the best quotas is known. The random numbers are the same in every run.

Among schedules of equal time, `lightest` chooses that with the least memory, then that with the fewest messages.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from heapq import nsmallest
from itertools import islice
from math import inf
from random import Random

from pipecompile.ir import Schedule
from pipecompile.schedules.search.evaluate import Evaluator, MemoryLimit
from pipecompile.schedules.search.list_scheduling import ListSchedule, PriorityRule, list_schedule
from pipecompile.schedules.search.makespan_bound import makespan_lower_bound
from pipecompile.schedules.search.priority_rules import candidate_rules
from pipecompile.schedules.search.workload import Workload
from pipecompile.simulation.from_schedule import device_transfers

__all__ = ["EvaluatedSchedule", "ListSearch", "hill_climb", "lightest"]

_ROUNDS = 6
"""Number of corrections of the memory."""

_MANY = 0.5
"""Share of the budget that a rule may take for a second one to be tried in any case."""

_FINALISTS = 4
"""Number of rules that are scheduled again after a correction."""

_MOST_RULES = 10**9
"""More rules than there are."""

_NEGLIGIBLE = 1e-9
"""Relative tolerance for comparing seconds."""

_MAX_FAILURES = 150
"""Changes without progress after which hill climbing stops."""


@dataclass(frozen=True, slots=True)
class EvaluatedSchedule:
    """A schedule that fits the memory, its simulated seconds, and its evaluator."""

    seconds: float
    schedule: Schedule
    evaluator: Evaluator


class ListSearch:
    """Budgeted search over list schedules; `best` is the fastest that fits, None so far if no schedule fits.

    Budgets are numbers of scheduled actions. `finalists` has (seconds, rule, schedule) of the fastest rules.
    """

    def __init__(self, evaluator: Evaluator, workload: Workload, n_microbatches: int) -> None:
        self.evaluator, self.workload, self.m = evaluator, workload, n_microbatches
        self.capacity = evaluator.capacity
        self.untried = candidate_rules(workload, n_microbatches)
        self.actions = n_microbatches * sum(2 + workload.split + flag for flag in workload.is_recomputed)
        self.finalists: list[tuple[float, PriorityRule, ListSchedule]] = []
        self.best: EvaluatedSchedule | None = None

    @property
    def seconds(self) -> float:
        """Seconds of the best schedule; infinite if no schedule fits."""
        return self.best.seconds if self.best else float("inf")

    @cached_property
    def target(self) -> float:
        """The lower bound in seconds with the stages that the workload recomputes."""
        return makespan_lower_bound(self.workload, self.m, self.evaluator.capacity)

    @property
    def is_optimal(self) -> bool:
        """Return whether the best schedule reaches the lower bound of the stages that it recomputes."""
        return self.seconds <= self.target * (1 + _NEGLIGIBLE)

    def try_rules(self, budget: float) -> None:
        """Try the next rules, at least two, or one if two take far more than the budget."""
        least = 2 if self.actions < budget * _MANY else 1
        self._rank(islice(self.untried, max(least, int(min(budget / self.actions, _MOST_RULES)))))
        self._fit_memory()

    def climb(self, budget: float) -> None:
        """Improve the best rule by hill climbing, unless the lower bound is reached."""
        if self.finalists and not self.is_optimal:
            _, rule, result = self.finalists[0]
            runs = int(budget / self.actions)
            self._consider(
                hill_climb(self.workload, self.m, self.capacity, (rule, result), target=self.target, runs=runs)
            )

    def _rank(self, rules: Iterable[PriorityRule]) -> None:
        """Schedule `rules`, and keep the fastest finalists, whether or not they fit."""
        for rule in rules:
            result = list_schedule(self.workload, self.m, self.capacity, rule)
            if result is not None:
                self.finalists.append((result.seconds, rule, result))
        self.finalists = nsmallest(_FINALISTS, self.finalists, key=_time_and_quotas)

    def _fit_memory(self) -> None:
        """Reduce the capacity and reschedule the finalists until one fits."""
        for _ in range(_ROUNDS):
            fitting = [self._consider(result) for _, _, result in self.finalists]
            if any(fitting) or not fitting:
                break
            self._reduce_capacity(self._schedule(self.finalists[0][2]))
            rules, self.finalists = [rule for _, rule, _ in self.finalists], []
            self._rank(rules)

    def _consider(self, result: ListSchedule) -> bool:
        """Return whether the schedule fits; update `best` if it is faster."""
        schedule = self._schedule(result)
        fits = not any(self.evaluator.excess(schedule))
        if fits and (seconds := self.evaluator.seconds(schedule)) < self.seconds:
            self.best = EvaluatedSchedule(seconds, schedule, self.evaluator)
        return fits

    def _schedule(self, result: ListSchedule) -> Schedule:
        return Schedule(self.workload.n_stages, self.m, self.workload.placement, result.rows)

    def _reduce_capacity(self, schedule: Schedule) -> None:
        """Subtract the peak bytes of value buffers from the capacity of devices that exceed their limit."""
        evaluator = self.evaluator
        peaks, excess = evaluator.peaks(schedule), evaluator.excess(schedule)
        saved = [
            base + evaluator.peak_saved(row) for base, row in zip(evaluator.parameter_bytes, schedule.rows, strict=True)
        ]
        self.capacity = tuple(
            min(now, whole - (peak - own)) if over else now
            for now, whole, peak, own, over in zip(self.capacity, evaluator.capacity, peaks, saved, excess, strict=True)
        )


def _time_and_quotas(finalist: tuple[float, PriorityRule, ListSchedule]) -> tuple[float, float]:
    """Return the seconds to nine digits, and the sum of the quotas: of equally fast rules, the one that holds least comes first."""
    seconds, rule, _ = finalist
    return float(f"{seconds:.9g}"), sum(rule.in_flight)


def hill_climb(
    workload: Workload,
    n_microbatches: int,
    capacity: Sequence[float],
    start: tuple[PriorityRule, ListSchedule],
    *,
    target: float,
    runs: int,
) -> ListSchedule:
    """Return the fastest list schedule of `runs` random changes of a rule. Stops early at `target` seconds, or after
    `_MAX_FAILURES` changes without progress.
    """
    rng, failures = Random(0), 0
    rule, best = start
    rule = replace(rule, in_flight=tuple(min(count, n_microbatches) for count in rule.in_flight))
    for _ in range(runs):
        if best.seconds <= target * (1 + _NEGLIGIBLE) or failures > _MAX_FAILURES:
            break
        neighbour = _neighbour(rule, n_microbatches, rng)
        result = list_schedule(workload, n_microbatches, capacity, neighbour)
        failures += 1
        if result is not None and result.seconds <= best.seconds:
            failures *= result.seconds > best.seconds * (1 - _NEGLIGIBLE)
            rule, best = neighbour, result
    return best


def _neighbour(rule: PriorityRule, n_microbatches: int, rng: Random) -> PriorityRule:
    """Return `rule` with other quotas for up to three stages, or another rank for one."""
    stage = rng.randrange(len(rule.in_flight))
    if rng.random() < 0.5:
        quotas = list(rule.in_flight)
        for _ in range(rng.randint(1, 3)):
            quotas[stage] = max(1, min(n_microbatches, quotas[stage] + rng.choice((-2, -1, 1, 2))))
            stage = rng.randrange(len(quotas))
        return replace(rule, in_flight=tuple(quotas))
    is_forward = rng.random() < 0.5
    ranks = list(rule.forward if is_forward else rule.backward)
    ranks[stage] += rng.uniform(-3, 3) * rng.choice((1, 1e3, 1e6))
    return replace(rule, forward=tuple(ranks)) if is_forward else replace(rule, backward=tuple(ranks))


def lightest(candidates: Sequence[EvaluatedSchedule]) -> EvaluatedSchedule:
    """Return the fastest schedule; of equally fast ones that with the least memory, then that with the fewest messages."""
    least = min(candidate.seconds for candidate in candidates)
    fastest = [candidate for candidate in candidates if candidate.seconds <= least * (1 + _NEGLIGIBLE)]
    return fastest[0] if len(fastest) == 1 else min(fastest, key=_load)


def _load(candidate: EvaluatedSchedule) -> tuple[float, float, int]:
    """Return the largest peak of a device and the sum of all, in bytes or micro-batches in flight, and the number of messages."""
    evaluator = candidate.evaluator
    unlimited = MemoryLimit((inf,) * candidate.schedule.n_devices, in_bytes=any(evaluator.costs.saved))
    peaks = replace(evaluator, limit=unlimited).peaks(candidate.schedule)
    return max(peaks), sum(peaks), sum(1 for _ in device_transfers(evaluator.routes, evaluator.placement))
