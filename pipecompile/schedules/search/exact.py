"""The exact back end: CP-SAT of OR-Tools proves how good a schedule is, and improves it.

    incumbent ──► hint ──┐
    bound     ──► floor ─┼──► CP-SAT: proof by search, and neighbourhoods around the incumbent ──► rows, bound
    seconds   ──► limit ─┘

OR-Tools is the extra `exact` of this package. It is imported when it is first needed. Without it nothing is proven beyond the bounds of
`makespan_bound.py`.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from time import perf_counter
from typing import Any

from pipecompile.ir import Kind, Schedule
from pipecompile.schedules.search.evaluate import Evaluator
from pipecompile.schedules.search.exact_model import ExactModel, build_model
from pipecompile.schedules.search.exact_rows import rows_of
from pipecompile.schedules.search.list_search import EvaluatedSchedule
from pipecompile.schedules.search.workload import Workload
from pipecompile.simulation.event_walk import walk
from pipecompile.simulation.from_schedule import tasks_of_schedule

__all__ = ["MOST_ACTIONS", "ExactProblem", "ExactResult", "cp_sat", "solve_exactly"]

MOST_ACTIONS = 6000
"""Actions up to which a model is built: it takes some 0.2 ms an action, and beyond some thousand CP-SAT improves little in seconds."""

_BUILD_SECONDS = 1e-4
"""Seconds per action that it takes at least to build a model and to begin."""

_PHASES = (0.4, 1), (0.6, 8)
"""Shares of the time, and searches that take turns: one search closes small cases at once; of eight, some raise the bound, and some search
neighbourhoods of the incumbent."""


@cache
def cp_sat() -> Any:
    """Return the module of CP-SAT, or None if OR-Tools is not installed."""
    return import_module("ortools.sat.python.cp_model") if find_spec("ortools") is not None else None


@dataclass(frozen=True, slots=True)
class ExactProblem:
    """A workload on the placement of its evaluator. `recompute`: every stage may recompute all of its micro-batches or none."""

    evaluator: Evaluator
    workload: Workload
    n_microbatches: int
    recompute: bool = False


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
    module, start = cp_sat(), perf_counter()
    n_actions = 3 * problem.n_microbatches * problem.workload.n_stages
    if module is None or n_actions > MOST_ACTIONS or min(seconds) <= n_actions * _BUILD_SECONDS:
        return ExactResult(None, bound)
    built = build_model(
        module, problem.workload, problem.n_microbatches, problem.evaluator.capacity, problem.evaluator.costs.engines,
        horizon=shorter_than, bound=bound, recompute=problem.recompute,
    )  # fmt: skip
    if incumbent is not None:
        _hint(built, incumbent, problem.evaluator)
    best, proven, is_interrupted = None, bound, False
    for share, workers in _PHASES:
        solver = module.CpSolver()
        solver.parameters.num_workers, solver.parameters.interleave_search = workers, workers > 1
        solver.parameters.max_deterministic_time = share * seconds[0]
        solver.parameters.max_time_in_seconds = max(0.01, min(1e6, seconds[1] - (perf_counter() - start)))
        status, is_interrupted = _solved(solver, built.model)
        if status == module.INFEASIBLE:
            return ExactResult(best, shorter_than)
        proven = max(proven, min(shorter_than, solver.best_objective_bound * built.tick.size))
        if status in (module.OPTIMAL, module.FEASIBLE):
            best = _shorter(best, _solution(problem, built, solver, shorter_than))
        if status == module.OPTIMAL or is_interrupted or perf_counter() - start > seconds[1]:
            break
    return ExactResult(best, proven, is_interrupted)


def _solved(solver: Any, model: Any) -> tuple[Any, bool]:
    """Return the status of the solver, and whether Ctrl-C has ended it. It runs in a thread: this one can then receive Ctrl-C."""
    solver.parameters.catch_sigint_signal = False
    with ThreadPoolExecutor(1) as pool:
        solution = pool.submit(solver.solve, model)
        try:
            return solution.result(), False
        except KeyboardInterrupt:
            solver.stop_search()
            return solution.result(), True


def _solution(problem: ExactProblem, built: ExactModel, solver: Any, shorter_than: float) -> EvaluatedSchedule | None:
    """Return the simulated schedule of a solution; None if it is not shorter, or exceeds the memory beyond what the model counts."""
    workload, evaluator = problem.workload, problem.evaluator
    rows = rows_of(built, solver.value, workload)
    schedule = Schedule(workload.n_stages, problem.n_microbatches, workload.placement, rows)
    seconds = evaluator.seconds(schedule)
    fits = seconds < shorter_than and not any(evaluator.excess(schedule))
    return EvaluatedSchedule(seconds, schedule, evaluator) if fits else None


def _shorter(best: EvaluatedSchedule | None, found: EvaluatedSchedule | None) -> EvaluatedSchedule | None:
    """Return the shorter of two schedules that may be missing: a later solution can be longer with launches by the host."""
    return min((each for each in (best, found) if each), key=lambda each: each.seconds, default=None)


def _hint(built: ExactModel, incumbent: Schedule, evaluator: Evaluator) -> None:
    """Add the times of the incumbent in ticks as a hint."""
    tasks, tick = tasks_of_schedule(incumbent, evaluator.routes, evaluator.costs), built.tick
    tasks.seconds = [float(tick.down(seconds)) for seconds in tasks.seconds]
    tasks.delays = [float(tick.down(seconds)) for seconds in tasks.delays]
    times = walk(tasks, evaluator.costs.engines)
    recomputed = set()
    for action, start, end in zip(tasks.actions, times.start, times.end, strict=True):
        if action is None:
            continue
        s, m, kind = action.stage, action.microbatch, action.kind
        cell = Kind.INPUT_GRAD if kind is Kind.BACKWARD else kind
        if (cell, s, m) in built.start:
            built.model.add_hint(built.start[cell, s, m], int(start))
        if kind is Kind.RECOMPUTE:
            recomputed.add(s)
        if (s, m) in built.is_whole and cell is Kind.INPUT_GRAD:
            built.model.add_hint(built.is_whole[s, m], kind is Kind.BACKWARD)
            if kind is Kind.BACKWARD:
                built.model.add_hint(built.start[Kind.WEIGHT_GRAD, s, m], int(end))
    for s, flag in built.recomputes.items():
        built.model.add_hint(flag, s in recomputed)
