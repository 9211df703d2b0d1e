"""The exact back end: CP-SAT of OR-Tools proves how good a schedule is, and improves it.

    refute     is there a schedule of at most t seconds? No: t is a bound. Halving the gap by propagation alone takes little time
    search     for the shortest schedule, upwards from the bound: is there one that takes no longer than it?
    search     downwards from the best schedule: closes what the other one does not
    windows    the order of the best schedule is kept outside a window of time and searched within; the window moves on. What they
               leave of the time is for one more search downwards

All models have the makespan of the best schedule as their horizon, so a model without a solution proves that nothing is shorter.
Models of small problems under a limit of memory forbid waits once a solution with waits has exceeded the memory, or nothing else has
closed the gap: that raises the bound, and takes longer where waits are no help.
Without OR-Tools nothing is proven beyond the bounds of `makespan_bound.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from time import perf_counter
from typing import Any

from pipecompile.ir import Schedule
from pipecompile.schedules.search.evaluate import Evaluator
from pipecompile.schedules.search.exact_incumbent import add_hint, keep_order
from pipecompile.schedules.search.exact_model import build_model
from pipecompile.schedules.search.exact_no_waits import forbid_waits, never_wait
from pipecompile.schedules.search.exact_solver import Budget, Strategy, cp_sat, run
from pipecompile.schedules.search.exact_variables import ExactModel, rows_of
from pipecompile.schedules.search.list_search import EvaluatedSchedule
from pipecompile.schedules.search.workload import Workload

__all__ = ["MOST_ACTIONS", "ExactProblem", "ExactResult", "cp_sat", "solve_exactly"]

MOST_ACTIONS = 6000
"""Actions up to which a model is built: it takes some 0.2 ms an action, and beyond some thousand CP-SAT improves little in seconds."""

_LEAST_SECONDS = 6e-4
"""Deterministic seconds per action without which no model is built: several are."""

_REFUTATIONS, _REFUTATION_SECONDS = 6, 0.004
"""Halvings of the gap, and the share of the budget that each may take."""

_MOST_PAIRS = 10_000
"""Pairs of actions of one device up to which a model without waits is built."""

_SHARES = (0.3, 0.4)
"""Shares of the budget for a search in each direction; windows take the rest. Without an incumbent there are no windows."""

_SHARE_WITHOUT_WAITS = 0.6
"""Additional share of the budget for searches without waits, if a small problem is open after the others."""

_MOST_PROVABLE, _SHARE_OF_LARGE = 800, 0.4
"""Actions up to which proofs are tried with all the time, and the share of it that larger problems get: the rest is for proofs."""

_WINDOW_SECONDS = 0.05
"""Deterministic seconds of a window: of 64 cells, most windows of a quarter of the step are searched to the end in half of it."""

_WIDTHS = (0.25, 0.4, 0.6)
"""Widths of windows as shares of the step: the next after the windows of one width, half overlapping, have found nothing."""

_STEP = 0.9e-4
"""Relative improvement that a run has to find: less is not worth it, and within the gap up to which a schedule counts as optimal."""


@dataclass(frozen=True, slots=True)
class ExactProblem:
    """A workload on the placement of its evaluator. `recompute`: every stage may recompute all of its micro-batches or none."""

    evaluator: Evaluator
    workload: Workload
    n_microbatches: int
    recompute: bool = False

    @property
    def n_actions(self) -> int:
        """Return the number of F, I and W."""
        return 3 * self.n_microbatches * self.workload.n_stages

    @property
    def is_large(self) -> bool:
        """Return whether a proof is unlikely."""
        return self.n_actions > _MOST_PROVABLE

    @property
    def may_forbid_waits(self) -> bool:
        """Return whether waits could pay, no action does wait on purpose, and the problem is small enough to say so."""
        is_small = self.n_actions**2 <= _MOST_PAIRS * self.workload.n_devices
        return is_small and self.evaluator.limit is not None and never_wait(self.evaluator.costs)

    def model(self, horizon: float, bound: float, *, waits: bool = True) -> ExactModel:
        """Return the model of schedules that take from `bound` to `horizon` seconds, and may have `waits`."""
        built = build_model(
            cp_sat(), self.workload, self.n_microbatches, self.evaluator.capacity, self.evaluator.costs.engines,
            horizon=horizon, bound=bound, recompute=self.recompute,
        )  # fmt: skip
        if not waits:
            forbid_waits(built, self.workload.placement)
        return built


@dataclass(frozen=True, slots=True)
class ExactResult:
    """The best schedule that was found, None if none is shorter, and the proven lower bound on the makespan in seconds.

    `is_interrupted` says that Ctrl-C ended the search.
    """

    schedule: EvaluatedSchedule | None
    bound: float
    is_interrupted: bool = False


def solve_exactly(
    problem: ExactProblem,
    incumbent: Schedule | None,
    *,
    shorter_than: float,
    bound: float,
    seconds: tuple[float, float],
) -> ExactResult:
    """Return the result of a search for a schedule that takes less than `shorter_than` seconds, where none takes less than `bound`.

    `incumbent` is a schedule of the same placement, where there is one. `seconds` limits the deterministic time of CP-SAT, which is
    the same in every run, and the time on the clock.
    """
    n_actions, limit = problem.n_actions, seconds[0] * (_SHARE_OF_LARGE if problem.is_large else 1.0)
    if cp_sat() is None or n_actions > MOST_ACTIONS or min(seconds) <= n_actions * _LEAST_SECONDS:
        return ExactResult(None, bound)
    search = _ExactSearch(problem, incumbent, shorter_than, bound, Budget(limit, perf_counter() + seconds[1]))
    search.refute(_REFUTATION_SECONDS * seconds[0])
    if problem.is_large:
        search.search(limit * (sum(_SHARES) if incumbent else 1.0), Strategy.LARGE)
        search.move_windows()
    else:
        search.search(limit * _SHARES[0], Strategy.UPWARDS)
        search.search(limit * (_SHARES[1] if incumbent else 1.0), Strategy.DOWNWARDS)
        search.move_windows()
        search.search(limit, Strategy.DOWNWARDS)
        search.forbid_waits(limit * _SHARE_WITHOUT_WAITS)
    return ExactResult(search.best, search.bound, search.budget.is_interrupted)


@dataclass(slots=True)
class _ExactSearch:
    """The state of the search: nothing is shorter than `bound`, and something takes `seconds`. Equal: nothing is left to do."""

    problem: ExactProblem
    incumbent: Schedule | None
    seconds: float
    bound: float
    budget: Budget
    best: EvaluatedSchedule | None = None
    waits: bool = True
    """Whether models have waits: until a solution exceeds the memory as it runs."""

    @property
    def is_open(self) -> bool:
        """Return whether the gap is open and a run may begin."""
        return self.bound < self.seconds * (1 - 1e-9) and self.budget.is_left

    def refute(self, seconds: float) -> None:
        """Raise the bound: halve the part of the gap in which nothing is refuted, with `seconds` for each half."""
        above = self.seconds
        for _ in range(_REFUTATIONS):
            if not self.is_open:
                break
            target = (self.bound + above) / 2
            model = self._model(target, target)
            solver, status = self._run(model, seconds)
            if status == cp_sat().INFEASIBLE:
                self.bound = min(self.seconds, model.least_above(target))
            else:
                above = target
                self._take(model, solver, status)

    def search(self, seconds: float, strategy: Strategy) -> None:
        """Search for the shortest schedule."""
        if not self._is_worth_a_run():
            return
        module, horizon = cp_sat(), self.seconds * (1 if strategy is Strategy.LARGE else 1 - _STEP)
        model = self._model(horizon, self.bound)
        if self.incumbent is not None and strategy is not Strategy.UPWARDS:
            add_hint(model, self.incumbent, self.problem.evaluator)
        solver, status = self._run(model, seconds, strategy)
        if status == module.INFEASIBLE:
            self.bound = min(self.seconds, model.least_above(horizon))
            return
        self.bound = max(self.bound, min(horizon, solver.best_objective_bound * model.tick.size))
        self._take(model, solver, status)

    def forbid_waits(self, seconds: float) -> None:
        """Search in both directions without waits, with additional `seconds`, if models had waits so far and may be without."""
        if self.waits and self.problem.may_forbid_waits and not self.budget.is_interrupted:
            self.waits, self.budget.seconds = False, seconds
            self.search(seconds / 2, Strategy.UPWARDS)
            self.search(seconds, Strategy.DOWNWARDS)

    def move_windows(self) -> None:
        """Search windows of the incumbent, until one sweep of every width has found nothing."""
        for width in _WIDTHS:
            failures, sweep = 0, int(2 / width)
            for place in count():
                if self.incumbent is None or not self._is_worth_a_run() or failures >= sweep:
                    break
                start = place % sweep * width / 2
                failures = 0 if self._improved(start, start + width) else failures + 1

    def _is_worth_a_run(self) -> bool:
        return self.is_open and self.bound < self.seconds * (1 - _STEP)

    def _improved(self, start: float, end: float) -> bool:
        """Return whether another order between two shares of the step is shorter."""
        assert self.incumbent is not None
        horizon = max(self.bound, self.seconds * (1 - _STEP))
        model = self._model(horizon, self.bound)
        add_hint(model, self.incumbent, self.problem.evaluator)
        keep_order(model, self.incumbent, self.problem.evaluator, (start, end))
        solver, status = self._run(model, _WINDOW_SECONDS, Strategy.QUICK if self.problem.is_large else Strategy.WINDOW)
        return self._take(model, solver, status)

    def _model(self, horizon: float, bound: float) -> ExactModel:
        return self.problem.model(horizon, bound, waits=self.waits)

    def _run(self, model: ExactModel, seconds: float, strategy: Strategy = Strategy.QUICK) -> tuple[Any, Any]:
        n_actions, has_options = self.problem.n_actions, model.has_options
        return run(model.model, n_actions, self.budget, seconds, strategy, has_options=has_options)

    def _take(self, model: ExactModel, solver: Any, status: Any) -> bool:
        """Return whether the solution is a shorter schedule that fits; it becomes the incumbent. Its rows are simulated: the memory
        and the launches by the host may exceed what the model counts.
        """
        if status not in (cp_sat().OPTIMAL, cp_sat().FEASIBLE):
            return False
        workload, evaluator = self.problem.workload, self.problem.evaluator
        rows = rows_of(model, solver.value, workload)
        schedule = Schedule(workload.n_stages, self.problem.n_microbatches, workload.placement, rows)
        seconds = evaluator.seconds(schedule)
        if any(evaluator.excess(schedule)):
            self.waits = not self.problem.may_forbid_waits
            return False
        if seconds >= self.seconds:
            return False
        self.seconds, self.incumbent, self.best = seconds, schedule, EvaluatedSchedule(seconds, schedule, evaluator)
        return True
