"""List schedules of one placement and one choice of what is recomputed, the fastest that fits first of all.

What a list schedule holds itself to is what stages save. When a schedule does not fit beside the buffers of its values, the
room is made smaller by what those took, and the best tastes have another go.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import nsmallest
from itertools import islice

from pipecompile.ir import Schedule
from pipecompile.schedules.climbing import climbed
from pipecompile.schedules.search.evaluate import Judge
from pipecompile.schedules.search.list_scheduling import Listed, Taste, list_schedule
from pipecompile.schedules.search.lower_bound import shortest_step
from pipecompile.schedules.search.priority_rules import tastes
from pipecompile.schedules.search.workload import Work

__all__ = ["Found", "Lister"]

_ROUNDS, _FINALISTS = 6, 4
"""How often the room is made smaller, and how many tastes have another go then."""


@dataclass(frozen=True, slots=True)
class Found:
    """A schedule that fits."""

    seconds: float
    schedule: Schedule
    judge: Judge


class Lister:
    """Tries tastes as far as budgets go, in numbers of actions scheduled; `found` is the best that fits, if any does."""

    def __init__(self, judge: Judge, work: Work, n_microbatches: int) -> None:
        self.judge, self.work, self.m = judge, work, n_microbatches
        self.room = judge.room
        self.untried = tastes(work, n_microbatches)
        self.actions = n_microbatches * sum(2 + work.split + again for again in work.again)
        self.target = shortest_step(work, n_microbatches, judge.room)
        self.best: list[tuple[float, Taste, Listed]] = []
        self.found: Found | None = None

    @property
    def seconds(self) -> float:
        """Of the best that fits; endless when nothing does."""
        return self.found.seconds if self.found else float("inf")

    def spend(self, budget: float) -> None:
        """Try the next tastes, at least two."""
        self._rank(islice(self.untried, max(2, int(budget / self.actions))))
        self._settle()

    def climb(self, budget: float) -> None:
        """Change the best taste little by little."""
        if self.best and self.seconds > self.target * (1 + 1e-9):
            _, taste, listed = self.best[0]
            runs = int(budget / self.actions)
            better = climbed(self.work, self.m, self.room, (taste, listed), target=self.target, runs=runs)
            self._take(better)

    def _rank(self, tried: Sequence[Taste] | islice[Taste]) -> None:
        for taste in tried:
            listed = list_schedule(self.work, self.m, self.room, taste)
            if listed is not None:
                self.best.append((listed.seconds, taste, listed))
        self.best = nsmallest(_FINALISTS, self.best, key=lambda each: each[0])

    def _settle(self) -> None:
        """Until one of the best fits."""
        for _ in range(_ROUNDS):
            fitting = [self._take(listed) for _, _, listed in self.best]
            if any(fitting) or not fitting:
                break
            self._shrink(self._schedule(self.best[0][2]))
            again, self.best = [taste for _, taste, _ in self.best], []
            self._rank(again)

    def _take(self, listed: Listed) -> bool:
        """Is this a schedule that fits? Keeps the best."""
        schedule = self._schedule(listed)
        fits = not any(self.judge.excess(schedule))
        if fits and (seconds := self.judge.seconds(schedule)) < self.seconds:
            self.found = Found(seconds, schedule, self.judge)
        return fits

    def _schedule(self, listed: Listed) -> Schedule:
        return Schedule(self.work.n_stages, self.m, self.work.placement, listed.rows)

    def _shrink(self, schedule: Schedule) -> None:
        """Take from the room what the buffers took, on devices where it was too little."""
        judge = self.judge
        peaks, excess = judge.peaks(schedule), judge.excess(schedule)
        saved = [base + judge.held(row) for base, row in zip(judge.constant, schedule.rows, strict=True)]
        self.room = tuple(
            min(now, whole - (peak - own)) if beyond else now
            for now, whole, peak, own, beyond in zip(self.room, judge.room, peaks, saved, excess, strict=True)
        )
