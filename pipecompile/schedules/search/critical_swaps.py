"""Tabu search on the critical path: swap two neighbouring actions of a row where that may shorten the step.

    row    ... 0F3 0I0 ...      both on the critical path, and the second waits only for the first
    to     ... 0I0 0F3 ...      the second starts earlier, the first later

Problem: the order of actions on each device with the least makespan, a job shop. Only swaps of neighbours on the critical path
can shorten it: Van Laarhoven, Aarts, Lenstra, "Job Shop Scheduling by Simulated Annealing", 1992. Each step simulates every such
swap and makes the best, even if it is not an improvement; the reverse swap is forbidden (tabu) for the next steps. The cost is the
number of walks (simulations), each linear in the number of actions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

from pipecompile.ir import Action, Kind, Route, Schedule
from pipecompile.schedules.search.deadline import Deadline
from pipecompile.simulation.costs import Costs
from pipecompile.simulation.critical_path import critical_path
from pipecompile.simulation.from_schedule import tasks_of_schedule
from pipecompile.simulation.host_launches import walk_with_hosts
from pipecompile.simulation.task_graph import Times

__all__ = ["improve"]

Fits = Callable[[int, Sequence[Action | None]], bool]
"""(device, row of its actions) -> whether the row fits the memory."""

Accepts = Callable[[Schedule], bool]
"""Whether a schedule may be the result. Asked of every shorter one, so that a later one which is not accepted loses nothing."""

_TABU = 8
"""Steps for which the reverse of a swap is forbidden."""

_NEGLIGIBLE = 1e-9
"""Relative tolerance for comparing seconds."""


def improve(
    schedule: Schedule,
    routes: Sequence[Route],
    costs: Costs,
    fits: Fits,
    *,
    target: float,
    walks: int,
    deadline: Deadline | None = None,
    accepts: Accepts = lambda _: True,
) -> Schedule:
    """Return a schedule that takes no longer, of those that `accepts`. Stop at a makespan of `target` seconds, after `walks` simulations,
    or with a deadline at Ctrl-C.
    """
    search = _TabuSearch(schedule, routes, costs, fits, accepts)
    with nullcontext() if deadline is None else deadline.moved_by_interrupt():
        while search.walks < walks and search.best > target * (1 + _NEGLIGIBLE):
            if not search.step():
                break
    return replace(schedule, rows=search.rows, certificate=None)


class _TabuSearch:
    """The current order of tasks, and `rows`, the best order so far, which takes `best` seconds."""

    def __init__(self, schedule: Schedule, routes: Sequence[Route], costs: Costs, fits: Fits, accepts: Accepts) -> None:
        self.tasks, self.costs, self.fits = tasks_of_schedule(schedule, routes, costs), costs, fits
        self.schedule, self.accepts = schedule, accepts
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
        return walk_with_hosts(self.schedule, self.tasks, self.costs)

    def step(self) -> bool:
        """Make the best permitted swap on the critical path. Return False if no swap is permitted."""
        self.steps += 1
        permitted: list[tuple[float, int]] = []
        for task in self._swaps():
            seconds = self._seconds_with_swap(task)
            pair = self.tasks.actions[task + 1], self.tasks.actions[task]
            if seconds is not None and (self.tabu.get(pair, 0) < self.steps or seconds < self.best * (1 - _NEGLIGIBLE)):
                permitted.append((seconds, task))
        if not permitted:
            return False
        seconds, task = min(permitted)
        self._swap(task)
        self.tabu[self.tasks.actions[task + 1], self.tasks.actions[task]] = self.steps + _TABU
        self.times = self._walk()
        if seconds < self.best * (1 - _NEGLIGIBLE):
            actions = self.tasks.actions
            rows = tuple(tuple(a for task in row if (a := actions[task]) is not None) for row in self.tasks.rows)
            if self.accepts(replace(self.schedule, rows=rows, certificate=None)):
                self.best, self.rows = seconds, rows
        return True

    def _swaps(self) -> list[int]:
        """Return the tasks that may swap with the next task of their row."""
        path = critical_path(self.tasks, self.times)
        return [a for a, b in zip(path, path[1:], strict=False) if a >= 0 and b == a + 1 and self._is_independent(a)]

    def _is_independent(self, task: int) -> bool:
        """Return whether the next task is in the same row and needs no result of `task`."""
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

    def _seconds_with_swap(self, task: int) -> float | None:
        """Return the makespan in seconds after the swap; None if the row exceeds the memory or the order deadlocks."""
        self._swap(task)
        row = self.tasks.rows[self.device[task]]
        seconds = None
        if self.fits(self.device[task], self.tasks.actions[row.start : row.stop]):
            times = self._walk()
            seconds = times.makespan if times.is_complete else None
        self._swap(task)
        return seconds

    def _swap(self, task: int) -> None:
        pair = slice(task, task + 2)
        columns: tuple[list[Any], ...] = (
            self.tasks.actions,
            self.tasks.seconds,
            self.tasks.needs,
            self.tasks.sends,
        )
        for column in columns:
            column[pair] = column[pair][::-1]
