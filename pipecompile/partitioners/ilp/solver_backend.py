"""A mixed-integer program in the making, and the solver that runs it: HiGHS, or the CBC that PuLP brings without highspy.

    mip = Mip()
    x = mip.variable(integer=True)                   a Linear: terms by column, and a constant
    mip.require(x * 2.0, y + 1.0)                    the row 2 x >= y + 1, unless it always holds
    mip.minimise(y, seconds=10)

Rows go into flat arrays and to the solver in one piece: with a modelling layer between, most of the time of an easy
problem is spent in writing it down.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from math import inf
from typing import Any

import numpy as np
import pulp
from numpy.typing import NDArray

__all__ = ["Linear", "Mip", "Outcome", "Watch"]

Watch = Callable[[float, float], None]
"""Called now and then while a program is solved, with the best objective so far and the proven bound."""

EPSILON = 1e-9
"""By how much a row without variables may be missed."""


class Linear:
    """A linear expression: the sum of coefficient * variable, by column, and a constant."""

    __slots__ = ("constant", "terms")

    def __init__(self, constant: float = 0.0, terms: dict[int, float] | None = None) -> None:
        self.constant, self.terms = constant, terms or {}

    def __add__(self, other: Linear | float) -> Linear:
        return Linear(self.constant, dict(self.terms)).add(other)

    def __sub__(self, other: Linear | float) -> Linear:
        return Linear(self.constant, dict(self.terms)).add(other, -1.0)

    def __mul__(self, factor: float) -> Linear:
        return Linear(self.constant * factor, {column: x * factor for column, x in self.terms.items()})

    def add(self, other: Linear | float, factor: float = 1.0) -> Linear:
        """Add so many times another expression to this one, in place."""
        if not isinstance(other, Linear):
            self.constant += factor * other
            return self
        self.constant += factor * other.constant
        terms = self.terms
        for column, x in other.terms.items():
            if value := terms.get(column, 0.0) + factor * x:
                terms[column] = value
            else:
                terms.pop(column, None)
        return self

    def value(self, values: Sequence[float] | NDArray[np.float64]) -> float:
        return self.constant + sum(x * values[column] for column, x in self.terms.items())


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the solver says: the values of the best solution or None, whether nothing better exists, a proven bound on the
    objective (infinite when there is no solution at all), and whether Ctrl-C ended it.
    """

    values: NDArray[np.float64] | None
    done: bool
    bound: float
    interrupted: bool = False


class Mip:
    """Columns and rows. Every row is left >= right."""

    def __init__(self) -> None:
        self.low: list[float] = []
        self.high: list[float] = []
        self.integer: list[bool] = []
        self._start, self._column, self._value = [0], list[int](), list[float]()
        self._least: list[float] = []

    def variable(self, low: float = 0.0, high: float = 1.0, *, integer: bool = False) -> Linear:
        self.low.append(low)
        self.high.append(high)
        self.integer.append(integer)
        return Linear(0.0, {len(self.low) - 1: 1.0})

    def require(self, left: Linear | float, right: Linear | float = 0.0) -> None:
        """Add the row left >= right, unless it holds always. A row that never holds stays, for the solver to find."""
        row = Linear().add(left).add(right, -1.0)
        reach = row.constant + sum(x * (self.low if x > 0 else self.high)[c] for c, x in row.terms.items())
        if reach < -EPSILON if not row.terms else reach < 0:
            self._column += row.terms.keys()
            self._value += row.terms.values()
            self._start.append(len(self._column))
            self._least.append(-row.constant)

    def positive(self, terms: Iterable[Linear], most: float = 1.0) -> Linear:
        """A variable that is at least 0 and at least every term; just a number when that is plain."""
        known, open_terms = 0.0, []
        for term in terms:
            if term.terms:
                open_terms.append(term)
            else:
                known = max(known, term.constant)
        if not open_terms or known >= most:
            return Linear(known)
        variable = self.variable(known, most)
        for term in open_terms:
            self.require(variable, term)
        return variable

    @property
    def n_rows(self) -> int:
        return len(self._least)

    def minimise(self, objective: Linear, seconds: float, *, gap: float = 1e-8, watch: Watch | None = None) -> Outcome:
        """Solve, to an absolute gap. Ctrl-C ends the solver: what it has found by then is returned, with a mark; when it has found nothing,
        KeyboardInterrupt is raised.
        """
        run = self._highs if find_spec("highspy") is not None else self._cbc
        with _held_back() as pressed:
            outcome = run(objective, max(seconds, 0.01), gap, watch, pressed)
        if pressed and outcome.values is None:
            raise KeyboardInterrupt
        return outcome

    def minimise_each(self, objectives: Sequence[Linear], seconds: float) -> list[float]:
        """The least of each objective, or a bound of it, integers taken for numbers: infinite when rows contradict each
        other, minus infinite when time is over.
        """
        run = self._highs_relaxed if find_spec("highspy") is not None else self._cbc_relaxed
        with _held_back() as pressed:
            found = run(objectives, max(seconds, 0.01))
        if pressed:
            raise KeyboardInterrupt
        return found

    # -- HiGHS ------------------------------------------------------------------------------------------------------

    def _highs(
        self, objective: Linear, seconds: float, gap: float, watch: Watch | None, pressed: list[bool]
    ) -> Outcome:
        import highspy

        solver = self._solver(highspy, seconds, relaxed=False)
        solver.setOptionValue("mip_abs_gap", gap)
        _aim(solver, objective)

        def listen(event: Any) -> None:
            if pressed:
                event.interrupt()
            elif watch is not None:
                watch(event.data_out.mip_primal_bound, event.data_out.mip_dual_bound)

        solver.cbMipInterrupt.subscribe(listen)
        solver.run()
        solver.cbMipInterrupt.unsubscribe(listen)
        status, info = solver.getModelStatus(), solver.getInfo()
        if status == highspy.HighsModelStatus.kInfeasible:
            return Outcome(None, done=True, bound=inf)
        done = status in (highspy.HighsModelStatus.kOptimal, highspy.HighsModelStatus.kModelEmpty)
        found = done or info.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible
        values = np.array(solver.getSolution().col_value) if found else None
        bound = info.mip_dual_bound if any(self.integer) else _reached(objective, values, done=done)
        return Outcome(values, done, bound, interrupted=bool(pressed))

    def _highs_relaxed(self, objectives: Sequence[Linear], seconds: float) -> list[float]:
        import highspy

        solver, found = self._solver(highspy, seconds, relaxed=True), []
        for objective in objectives:
            _aim(solver, objective)
            solver.run()
            status = solver.getModelStatus()
            if status == highspy.HighsModelStatus.kInfeasible:
                return [inf] * len(objectives)
            done = status in (highspy.HighsModelStatus.kOptimal, highspy.HighsModelStatus.kModelEmpty)
            found.append(_reached(objective, np.array(solver.getSolution().col_value), done=done))
        return found

    def _solver(self, highspy: Any, seconds: float, *, relaxed: bool) -> Any:
        solver = highspy.Highs()
        solver.silent()
        for name, value in (("time_limit", seconds), ("mip_rel_gap", 0.0), ("mip_heuristic_effort", 0.01)):
            solver.setOptionValue(name, value)
        program = highspy.HighsLp()
        program.num_col_, program.num_row_ = len(self.low), len(self._least)
        program.col_cost_ = np.zeros(len(self.low))
        program.col_lower_, program.col_upper_ = np.array(self.low), np.array(self.high)
        program.row_lower_, program.row_upper_ = np.array(self._least), np.full(len(self._least), inf)
        program.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
        program.a_matrix_.start_ = np.array(self._start, dtype=np.int32)
        program.a_matrix_.index_ = np.array(self._column, dtype=np.int32)
        program.a_matrix_.value_ = np.array(self._value, dtype=np.float64)
        if not relaxed:
            kinds = highspy.HighsVarType
            program.integrality_ = [kinds.kInteger if integer else kinds.kContinuous for integer in self.integer]
        solver.passModel(program)
        return solver

    # -- CBC --------------------------------------------------------------------------------------------------------

    def _cbc(self, objective: Linear, seconds: float, gap: float, _watch: Watch | None, pressed: list[bool]) -> Outcome:
        model, columns = self._pulp(objective, relaxed=False)
        model.solve(pulp.PULP_CBC_CMD(msg=False, timeLimit=seconds, gapRel=0.0, gapAbs=gap))
        if model.sol_status == pulp.LpSolutionInfeasible:
            return Outcome(None, done=True, bound=inf)
        done = model.sol_status == pulp.LpSolutionOptimal  # model.status says "Optimal" on a time limit too
        found = done or model.sol_status == pulp.LpSolutionIntegerFeasible
        values = np.array([column.value() or 0.0 for column in columns]) if found else None
        return Outcome(values, done, _reached(objective, values, done=done) - gap, interrupted=bool(pressed))

    def _cbc_relaxed(self, objectives: Sequence[Linear], seconds: float) -> list[float]:
        found = []
        for objective in objectives:
            model, columns = self._pulp(objective, relaxed=True)
            model.solve(pulp.PULP_CBC_CMD(msg=False, timeLimit=seconds))
            if model.sol_status == pulp.LpSolutionInfeasible:
                return [inf] * len(objectives)
            values = np.array([column.value() or 0.0 for column in columns])
            found.append(_reached(objective, values, done=model.sol_status == pulp.LpSolutionOptimal))
        return found

    def _pulp(self, objective: Linear, *, relaxed: bool) -> tuple[Any, list[Any]]:
        columns = [
            pulp.LpVariable(f"x{c}", low, high, pulp.LpInteger if integer and not relaxed else pulp.LpContinuous)
            for c, (low, high, integer) in enumerate(zip(self.low, self.high, self.integer, strict=True))
        ]
        model, one = pulp.LpProblem("mip", pulp.LpMinimize), pulp.LpVariable("one", 1, 1)
        model.setObjective(
            pulp.lpSum([one * objective.constant, *(columns[c] * x for c, x in objective.terms.items())])
        )
        for row, least in enumerate(self._least):
            entries = range(self._start[row], self._start[row + 1])
            terms = [(columns[self._column[e]], self._value[e]) for e in entries] or [(one, 0.0)]
            model.addConstraint(pulp.LpAffineExpression(terms) >= least)
        return model, columns


def _aim(solver: Any, objective: Linear) -> None:
    """Give the solver another objective."""
    n = solver.getNumCol()
    cost = np.zeros(n)
    cost[list(objective.terms)] = list(objective.terms.values())
    solver.changeColsCost(n, np.arange(n, dtype=np.int32), cost)
    solver.changeObjectiveOffset(objective.constant)


def _reached(objective: Linear, values: NDArray[np.float64] | None, *, done: bool) -> float:
    """The bound that a solution is, once nothing better exists."""
    return objective.value(values) if done and values is not None else -inf


@contextmanager
def _held_back() -> Iterator[list[bool]]:
    """Note Ctrl-C instead of raising it inside the solver, from where it cannot be raised. In other threads it never is."""
    pressed: list[bool] = []
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGINT) is None:
        yield pressed
        return
    before = signal.signal(signal.SIGINT, lambda *_: pressed.append(True))
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, before)
