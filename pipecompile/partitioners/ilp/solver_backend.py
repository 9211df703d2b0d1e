"""A mixed-integer program, and the solver that runs it: HiGHS, or CBC (a part of PuLP) if highspy is not installed.

    mip = Mip()
    x = mip.add_variable(integer=True)               a LinearExpr: coefficients by column, and a constant
    mip.add_row(x * 2.0, y + 1.0)                    the row 2 x >= y + 1, unless it always holds
    mip.minimise(y, seconds=10)

Rows are collected in flat arrays and passed to the solver at once. With a modelling layer between, most of the time of an
easy problem is spent in building the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from math import inf
from time import monotonic
from typing import Any

import numpy as np
import pulp
from numpy.typing import NDArray

from pipecompile.partitioners.ilp.deferred_interrupt import deferred_interrupt

__all__ = ["LinearExpr", "Mip", "MipCallback", "MipResult", "OutOfTimeError"]

MipCallback = Callable[[float, float], None]
"""Called repeatedly while a program is solved, with (objective of the incumbent, proven lower bound)."""

EPSILON = 1e-9
"""Tolerance for the violation of a row without variables."""

ROWS_PER_CHECK = 500
"""Rows between two looks at the clock, a hundredth of a second."""


class OutOfTimeError(Exception):
    """The deadline has passed before all rows of a program were there."""


class LinearExpr:
    """A linear expression: `terms` maps the column of a variable to its coefficient, plus a constant."""

    __slots__ = ("constant", "terms")

    def __init__(self, constant: float = 0.0, terms: dict[int, float] | None = None) -> None:
        self.constant, self.terms = constant, terms or {}

    def __add__(self, other: LinearExpr | float) -> LinearExpr:
        return LinearExpr(self.constant, dict(self.terms)).add(other)

    def __sub__(self, other: LinearExpr | float) -> LinearExpr:
        return LinearExpr(self.constant, dict(self.terms)).add(other, -1.0)

    def __mul__(self, factor: float) -> LinearExpr:
        return LinearExpr(self.constant * factor, {column: x * factor for column, x in self.terms.items()})

    def add(self, other: LinearExpr | float, factor: float = 1.0) -> LinearExpr:
        """Add `factor` times another expression, in place, and return this one."""
        if not isinstance(other, LinearExpr):
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

    def evaluate(self, values: Sequence[float] | NDArray[np.float64]) -> float:
        """Return the value of the expression for these values of the variables, by column."""
        return self.constant + sum(x * values[column] for column, x in self.terms.items())


@dataclass(frozen=True, slots=True)
class MipResult:
    """The result of the solver.

    `values` is the best solution, by column, or None. `is_optimal` says that no better one exists (or none at all). `bound` is
    a proven lower bound of the objective, infinite if there is no solution. `is_interrupted` says that Ctrl-C ended the solve.
    """

    values: NDArray[np.float64] | None
    is_optimal: bool
    bound: float
    is_interrupted: bool = False


class Mip:
    """A mixed-integer program: columns (variables with bounds) and rows (constraints left >= right).

    Rows that are added after the deadline raise OutOfTimeError: a large program takes seconds to be written.
    """

    def __init__(self, deadline: float = inf) -> None:
        self.deadline, self._calls = deadline, 0
        self.lower: list[float] = []
        self.upper: list[float] = []
        self.integer: list[bool] = []
        self._start, self._column, self._value = [0], list[int](), list[float]()
        self._row_lower: list[float] = []

    def add_variable(self, lower: float = 0.0, upper: float = 1.0, *, integer: bool = False) -> LinearExpr:
        """Add a variable with bounds; return it as an expression."""
        self.lower.append(lower)
        self.upper.append(upper)
        self.integer.append(integer)
        return LinearExpr(0.0, {len(self.lower) - 1: 1.0})

    def add_row(self, left: LinearExpr | float, right: LinearExpr | float = 0.0) -> None:
        """Add the row left >= right unless its bounds imply it. A row that cannot hold is kept: the solver reports it."""
        self._calls += 1
        if not self._calls % ROWS_PER_CHECK and monotonic() > self.deadline:
            raise OutOfTimeError
        row = LinearExpr().add(left).add(right, -1.0)
        least = row.constant + sum(x * (self.lower if x > 0 else self.upper)[c] for c, x in row.terms.items())
        if least < -EPSILON if not row.terms else least < 0:
            self._column += row.terms.keys()
            self._value += row.terms.values()
            self._start.append(len(self._column))
            self._row_lower.append(-row.constant)

    def add_maximum(self, terms: Iterable[LinearExpr], most: float = 1.0) -> LinearExpr:
        """Return a variable of at most `most` that is at least 0 and at least every term; a constant if the terms are constants
        or one reaches `most`.
        """
        constant, open_terms = 0.0, []
        for term in terms:
            if term.terms:
                open_terms.append(term)
            else:
                constant = max(constant, term.constant)
        if not open_terms or constant >= most:
            return LinearExpr(constant)
        variable = self.add_variable(constant, most)
        for term in open_terms:
            self.add_row(variable, term)
        return variable

    @property
    def n_rows(self) -> int:
        """The number of rows."""
        return len(self._row_lower)

    def minimise(
        self, objective: LinearExpr, seconds: float, *, gap: float = 1e-8, callback: MipCallback | None = None
    ) -> MipResult:
        """Minimise an objective to an absolute gap, within `seconds`.

        Ctrl-C ends the solver: its incumbent is returned with `is_interrupted`. Without an incumbent, raise KeyboardInterrupt.
        """
        run = self._highs if find_spec("highspy") is not None else self._cbc
        with deferred_interrupt() as interrupts:
            result = run(objective, max(seconds, 0.01), gap, callback, interrupts)
        if interrupts and result.values is None:
            raise KeyboardInterrupt
        return result

    def minimise_relaxed(self, objectives: Sequence[LinearExpr], seconds: float) -> list[float]:
        """Return a lower bound of each objective, from the linear relaxation: infinite if the rows are infeasible, minus
        infinite if time is over.
        """
        run = self._highs_relaxed if find_spec("highspy") is not None else self._cbc_relaxed
        with deferred_interrupt() as interrupts:
            bounds = run(objectives, max(seconds, 0.01))
        if interrupts:
            raise KeyboardInterrupt
        return bounds

    # -- HiGHS ------------------------------------------------------------------------------------------------------

    def _highs(
        self, objective: LinearExpr, seconds: float, gap: float, callback: MipCallback | None, interrupts: list[bool]
    ) -> MipResult:
        import highspy

        solver = self._solver(highspy, seconds, relaxed=False)
        solver.setOptionValue("mip_abs_gap", gap)
        _set_objective(solver, objective)

        def on_event(event: Any) -> None:
            if interrupts:
                event.interrupt()
            elif callback is not None:
                callback(event.data_out.mip_primal_bound, event.data_out.mip_dual_bound)

        solver.cbMipInterrupt.subscribe(on_event)
        solver.run()
        solver.cbMipInterrupt.unsubscribe(on_event)
        status, info = solver.getModelStatus(), solver.getInfo()
        if status == highspy.HighsModelStatus.kInfeasible:
            return MipResult(None, is_optimal=True, bound=inf)
        is_optimal = status in (highspy.HighsModelStatus.kOptimal, highspy.HighsModelStatus.kModelEmpty)
        has_solution = is_optimal or info.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible
        values = np.array(solver.getSolution().col_value) if has_solution else None
        bound = info.mip_dual_bound if any(self.integer) else _bound_of(objective, values, is_optimal=is_optimal)
        return MipResult(values, is_optimal, bound, is_interrupted=bool(interrupts))

    def _highs_relaxed(self, objectives: Sequence[LinearExpr], seconds: float) -> list[float]:
        import highspy

        solver, bounds = self._solver(highspy, seconds, relaxed=True), []
        for objective in objectives:
            _set_objective(solver, objective)
            solver.run()
            status = solver.getModelStatus()
            if status == highspy.HighsModelStatus.kInfeasible:
                return [inf] * len(objectives)
            is_optimal = status in (highspy.HighsModelStatus.kOptimal, highspy.HighsModelStatus.kModelEmpty)
            bounds.append(_bound_of(objective, np.array(solver.getSolution().col_value), is_optimal=is_optimal))
        return bounds

    def _solver(self, highspy: Any, seconds: float, *, relaxed: bool) -> Any:
        solver = highspy.Highs()
        solver.silent()
        for name, value in (("time_limit", seconds), ("mip_rel_gap", 0.0), ("mip_heuristic_effort", 0.01)):
            solver.setOptionValue(name, value)
        program = highspy.HighsLp()
        program.num_col_, program.num_row_ = len(self.lower), len(self._row_lower)
        program.col_cost_ = np.zeros(len(self.lower))
        program.col_lower_, program.col_upper_ = np.array(self.lower), np.array(self.upper)
        program.row_lower_, program.row_upper_ = np.array(self._row_lower), np.full(len(self._row_lower), inf)
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

    def _cbc(
        self, objective: LinearExpr, seconds: float, gap: float, _callback: MipCallback | None, interrupts: list[bool]
    ) -> MipResult:
        model, columns = self._pulp(objective, relaxed=False)
        model.solve(pulp.PULP_CBC_CMD(msg=False, timeLimit=seconds, gapRel=0.0, gapAbs=gap))
        if model.sol_status == pulp.LpSolutionInfeasible:
            return MipResult(None, is_optimal=True, bound=inf)
        is_optimal = model.sol_status == pulp.LpSolutionOptimal  # model.status is "Optimal" on a time limit too
        has_solution = is_optimal or model.sol_status == pulp.LpSolutionIntegerFeasible
        values = np.array([column.value() or 0.0 for column in columns]) if has_solution else None
        return MipResult(
            values,
            is_optimal,
            _bound_of(objective, values, is_optimal=is_optimal) - gap,
            is_interrupted=bool(interrupts),
        )

    def _cbc_relaxed(self, objectives: Sequence[LinearExpr], seconds: float) -> list[float]:
        bounds = []
        for objective in objectives:
            model, columns = self._pulp(objective, relaxed=True)
            model.solve(pulp.PULP_CBC_CMD(msg=False, timeLimit=seconds))
            if model.sol_status == pulp.LpSolutionInfeasible:
                return [inf] * len(objectives)
            values = np.array([column.value() or 0.0 for column in columns])
            bounds.append(_bound_of(objective, values, is_optimal=model.sol_status == pulp.LpSolutionOptimal))
        return bounds

    def _pulp(self, objective: LinearExpr, *, relaxed: bool) -> tuple[Any, list[Any]]:
        columns = [
            pulp.LpVariable(f"x{c}", lower, upper, pulp.LpInteger if integer and not relaxed else pulp.LpContinuous)
            for c, (lower, upper, integer) in enumerate(zip(self.lower, self.upper, self.integer, strict=True))
        ]
        model, one = pulp.LpProblem("mip", pulp.LpMinimize), pulp.LpVariable("one", 1, 1)
        model.setObjective(
            pulp.lpSum([one * objective.constant, *(columns[c] * x for c, x in objective.terms.items())])
        )
        for row, row_lower in enumerate(self._row_lower):
            entries = range(self._start[row], self._start[row + 1])
            terms = [(columns[self._column[e]], self._value[e]) for e in entries] or [(one, 0.0)]
            model.addConstraint(pulp.LpAffineExpression(terms) >= row_lower)
        return model, columns


def _set_objective(solver: Any, objective: LinearExpr) -> None:
    """Replace the objective of a HiGHS solver."""
    n = solver.getNumCol()
    cost = np.zeros(n)
    cost[list(objective.terms)] = list(objective.terms.values())
    solver.changeColsCost(n, np.arange(n, dtype=np.int32), cost)
    solver.changeObjectiveOffset(objective.constant)


def _bound_of(objective: LinearExpr, values: NDArray[np.float64] | None, *, is_optimal: bool) -> float:
    """Return the objective of a solution as its bound if it is optimal, else minus infinity."""
    return objective.evaluate(values) if is_optimal and values is not None else -inf
