"""Runs of CP-SAT within a budget of deterministic time, which is the same in every run, and of time on the clock.

    run        one search, in this process: of several searches that take turns, each loads and presolves the model again
    relaxation none: linear programs took most of the time and raised no bound
    precedence what must come before what on a device follows from the times of the moment, not from the model alone: some proofs take
               a hundredth of the time. Models of many actions are too slow with it
    charged    the deterministic time that CP-SAT counts, and the time to build and load the model, which it does not count

OR-Tools is the extra `exact` of this package, imported when it is first needed.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import Enum
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from time import perf_counter
from typing import Any

__all__ = ["BUILD_SECONDS", "Budget", "Strategy", "cp_sat", "run"]

BUILD_SECONDS = 1e-4
"""Deterministic seconds that each action of a model is charged for building and loading it."""

_CLOCK_SECONDS, _CLOCK_RATE = 1.0, 10.0
"""Seconds, and ratio to the deterministic time, whose sum ends a run on the clock. Most runs take 1 to 6 times the deterministic time; under tight memory
some propagation takes minutes of which CP-SAT counts nothing.
"""


@cache
def cp_sat() -> Any:
    """Return the module of CP-SAT, or None if OR-Tools is not installed."""
    return import_module("ortools.sat.python.cp_model") if find_spec("ortools") is not None else None


@dataclass(slots=True)
class Budget:
    """The deterministic seconds that are left, and the end on the clock (`perf_counter`).

    `is_interrupted` says that Ctrl-C has ended a run.
    """

    seconds: float
    end: float
    is_interrupted: bool = False

    @property
    def is_left(self) -> bool:
        """Return whether another run may begin."""
        return not self.is_interrupted and self.seconds > 0 and perf_counter() < self.end


class Strategy(Enum):
    """A way to search for the makespan. The values say whether CP-SAT presolves, whether it finds precedences from the times of the
    moment, and whether it goes upwards: it assumes that the makespan is the bound, and raises the bound where that fails.
    """

    QUICK = (False, False, False)
    WINDOW = (False, True, False)
    UPWARDS = (True, True, True)
    DOWNWARDS = (True, True, False)
    LARGE = (True, False, False)


def run(
    model: Any, n_actions: int, budget: Budget, seconds: float, strategy: Strategy, *, has_options: bool
) -> tuple[Any, Any]:
    """Return the solver and its status after at most `seconds` of deterministic time, charged to the budget.

    If the model `has_options`, actions that may be left out, no precedences of the moment are found: OR-Tools 9.15 then ends the process
    with "conflicting constraint at positive level" on some models.
    """
    solver = cp_sat().CpSolver()
    parameters = solver.parameters
    parameters.num_workers, parameters.linearization_level = 1, 0
    presolve, precedence, upwards = strategy.value
    parameters.cp_model_presolve, parameters.use_objective_lb_search = presolve, upwards
    parameters.use_dynamic_precedence_in_disjunctive = precedence and not has_options
    limit = parameters.max_deterministic_time = max(1e-3, min(seconds, budget.seconds))
    parameters.max_time_in_seconds = max(0.01, min(_CLOCK_SECONDS + _CLOCK_RATE * limit, budget.end - perf_counter()))
    status, budget.is_interrupted = solved(solver, model)
    budget.seconds -= solver.response_proto.deterministic_time + n_actions * BUILD_SECONDS
    return solver, status


def solved(solver: Any, model: Any) -> tuple[Any, bool]:
    """Return the status of the solver, and whether Ctrl-C has ended it. It runs in a thread: this one can then receive Ctrl-C."""
    solver.parameters.catch_sigint_signal = False
    with ThreadPoolExecutor(1) as pool:
        solution = pool.submit(solver.solve, model)
        try:
            return solution.result(), False
        except KeyboardInterrupt:
            solver.stop_search()
            return solution.result(), True
