"""Local search: two neighbours in a row change places where that may shorten the critical path.

    row    ... 0F3 0I0 ...      both on the critical path, the second waits for the first alone
    to     ... 0I0 0F3 ...      and the first later; nothing else can help

Every swap of that kind on the path is tried, the best is made, also when it is none better, and not undone for some time
(tabu search). Van Laarhoven, Aarts, Lenstra, "Job Shop Scheduling by Simulated Annealing", 1992: other swaps cannot
shorten a path. The number of walks is what it costs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from pipecompile.ir import Action, Kind, Route, Schedule
from pipecompile.simulation.costs import Costs
from pipecompile.simulation.critical_path import critical_path
from pipecompile.simulation.event_walk import Times, walk
from pipecompile.simulation.from_schedule import tasks_of_schedule

__all__ = ["improve"]

Fits = Callable[[int, Sequence[Action | None]], bool]
"""May this be the row of this device?"""

_TABU = 8
_NEGLIGIBLE = 1e-9


def improve(
    schedule: Schedule, routes: Sequence[Route], costs: Costs, fits: Fits, *, target: float, walks: int
) -> Schedule:
    """A schedule that takes no longer; stops at `target` seconds or after so many walks."""
    search = _Search(schedule, routes, costs, fits)
    while search.walks < walks and search.best > target * (1 + _NEGLIGIBLE):
        if not search.step():
            break
    return replace(schedule, rows=search.rows)


class _Search:
    def __init__(self, schedule: Schedule, routes: Sequence[Route], costs: Costs, fits: Fits) -> None:
        self.tasks, self.costs, self.fits = tasks_of_schedule(schedule, routes, costs), costs, fits
        self.device = [d for d, row in enumerate(self.tasks.rows) for _ in row]
        self.feeds = {(r.source, c) for r in routes for c in r.consumers}
        self.returns = {(c, r.source) for r in routes if r.gradient for c in r.consumers}
        self.rows = schedule.rows
        self.tabu: dict[tuple[Action | None, Action | None], int] = {}
        self.steps = self.walks = 0
        self.times = self._walk()
        self.best = self.times.makespan

    def _walk(self) -> Times:
        self.walks += 1
        return walk(self.tasks, self.costs.engines)

    def step(self) -> bool:
        """Make the best swap on the critical path; False when there is none."""
        self.steps += 1
        found: list[tuple[float, int]] = []
        for task in self._candidates():
            after = self._tried(task)
            pair = self.tasks.actions[task + 1], self.tasks.actions[task]
            if after is not None and (self.tabu.get(pair, 0) < self.steps or after < self.best * (1 - _NEGLIGIBLE)):
                found.append((after, task))
        if not found:
            return False
        seconds, task = min(found)
        self._swap(task)
        self.tabu[self.tasks.actions[task + 1], self.tasks.actions[task]] = self.steps + _TABU
        self.times = self._walk()
        if seconds < self.best * (1 - _NEGLIGIBLE):
            self.best = seconds
            actions = self.tasks.actions
            self.rows = tuple(tuple(a for task in row if (a := actions[task]) is not None) for row in self.tasks.rows)
        return True

    def _candidates(self) -> list[int]:
        path = critical_path(self.tasks, self.times)
        return [a for a, b in zip(path, path[1:], strict=False) if a >= 0 and b == a + 1 and self._are_free(a)]

    def _are_free(self, task: int) -> bool:
        """Are this and the next task of one row, and does the next need nothing of this one?"""
        first, second = self.tasks.actions[task], self.tasks.actions[task + 1]
        if first is None or second is None or self.device[task] != self.device[task + 1]:
            return False
        if first.microbatch != second.microbatch:
            return True
        if first.stage == second.stage:
            return False
        if second.kind is Kind.FORWARD:
            return (first.stage, second.stage) not in self.feeds
        return (first.stage, second.stage) not in self.returns

    def _tried(self, task: int) -> float | None:
        """The seconds that a swap would give; None when it is not allowed."""
        self._swap(task)
        row = self.tasks.rows[self.device[task]]
        seconds = None
        if self.fits(self.device[task], self.tasks.actions[row.start : row.stop]):
            times = self._walk()
            seconds = times.makespan if times.is_complete else None
        self._swap(task)
        return seconds

    def _swap(self, task: int) -> None:
        here = slice(task, task + 2)
        columns: tuple[list[Any], ...] = (
            self.tasks.actions,
            self.tasks.seconds,
            self.tasks.needs,
            self.tasks.sends,
        )
        for column in columns:
            column[here] = column[here][::-1]
