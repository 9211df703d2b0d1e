"""Search over target bottlenecks between lower bound and incumbent, until they meet.

    lower bound ──┬────────────┬──────────────┬───────────── incumbent
                  refuted      refuted        solved: optimal, with proof

A *target* is refuted if no cut is below it: then it is a lower bound. Low targets are easy to refute, since contraction,
windows and boundary programs leave little or nothing to the integer program. The first target that is not refuted gives the
optimum, since the program minimises. The incumbent is tried first, as it is often optimal. If it is not settled at once, a
better cut is searched (neighbourhoods, stage filling), and targets between bound and incumbent are tried with increasing
*effort*: level n allows 3^n times the seconds and 16^n times the open step variables.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from time import monotonic

from pipecompile.partitioners.bottleneck_annealing import anneal
from pipecompile.partitioners.bounds.separations import contract
from pipecompile.partitioners.bounds.stage_windows import StageWindows, compute_windows
from pipecompile.partitioners.clusters import Clusters
from pipecompile.partitioners.dp.down_sets import MAX_PAIRS
from pipecompile.partitioners.dp.strategy import cut_down_sets_below
from pipecompile.partitioners.ilp.anchored_stages import anchor_bound
from pipecompile.partitioners.ilp.average_stage import average_bound
from pipecompile.partitioners.ilp.boundary_windows import tighten_windows
from pipecompile.partitioners.ilp.column_bound import column_bound
from pipecompile.partitioners.ilp.formulation import PartitionModel, build_model
from pipecompile.partitioners.ilp.greedy_fill import fill_stages
from pipecompile.partitioners.ilp.large_neighbourhood import improve_by_neighbourhoods
from pipecompile.partitioners.ilp.one_stage import SOLVER_TOLERANCE
from pipecompile.partitioners.ilp.shared_capacity import capacity_bound
from pipecompile.partitioners.ilp.solver_backend import LinearExpr, OutOfTimeError
from pipecompile.partitioners.incumbent import SolverState
from pipecompile.partitioners.objective import LoadTracker, fits

__all__ = ["close_gap"]

CLOSE = 0.003
"""Relative distance of a target above the bound at which it is not moved further down, but settled with more effort."""

STRIDE = 0.5, 0.25
"""Position of the next target between the bound (0) and the lowest unsettled target or the incumbent (1): at effort level 0,
and above. Targets nearer to the bound are refuted more often within the time of a program."""

FAR, MANY = 1.05, 500
"""Ratio of incumbent to lower bound, and clusters, above which the incumbent is improved before a target is tried: the windows of a
large problem alone take seconds, and close only near the optimum.
"""

MIN_TIGHTENING = 1.0
"""Least seconds for the linear programs of one target; otherwise a sixth of what is left."""

MAX_STEPS = 100_000
"""Open step variables beyond which no program is built: building it alone would take minutes."""

EASY_STEPS = 250
"""Open step variables up to which the integer program runs at effort level 0. Each level allows 16 times as many: a target
near the bound is often refuted long before a program of that size is solved."""

SECONDS = 4.0
"""Seconds for the integer program at effort level 0. Each level allows three times as many."""

FILL_SECONDS = 0.1
"""Seconds for the integer program that fills one stage, at effort level 0."""

SOLVER_GAP = 1e-8
"""Least absolute gap of the integer program, as a fraction of the target."""

ANNEALED, ANNEALING_SHARE = 1.01, 6
"""Ratio of incumbent to lower bound above which the cut is annealed, and divisor of the seconds left that the first annealing may take.
Random graphs in 16 stages get a bottleneck up to 0.6 % smaller in 7 CPU seconds.
"""

NEIGHBOURHOOD_SHARE = 8
"""Divisor of the seconds left that the neighbourhoods of one effort level may take, and annealing before them."""

CAPACITY_SHARE = 8
"""Divisor of the seconds left that the bound from all stages together may take."""

AVERAGE_SHARE = 0.4
"""Share of the seconds left that the bound from one stage of average work may take. Random graphs of 90 to 190 clusters
(`benchmarks/partition_random.py`) in 16 stages take 2 to 6 CPU seconds, with 190 up to 15, and in 8 stages 10 to 15.
"""

COLUMN_SHARE, WIDE = (0.75, 0.25), 8
"""Share of the seconds left that the bound from covers by stages may take, and that where there are so many clusters for each stage: then it
is weaker, and better cuts are worth more. Random graphs of 60 to 100 clusters in 16 stages come within 3 % of the best cut in 10 CPU seconds.
"""

ANCHOR_RATIO = 1.5
"""Ratio of incumbent to lower bound above which tensors around single clusters decide the bottleneck, so that anchors help."""


@dataclass(slots=True)
class Attempt:
    """The problem below a target, reduced: contracted clusters and windows. Its work bounds hold for lower targets too."""

    target: float
    clusters: Clusters
    windows: StageWindows


def close_gap(state: SolverState) -> None:
    """Bring bound and incumbent together, or as close as the deadline permits."""
    if state.assignment is None or state.bottleneck == 0:
        return
    if state.bottleneck > FAR * state.lower_bound and len(state.clusters) > MANY:
        improve_by_neighbourhoods(state, 2, state.seconds_left / 4 + monotonic())
    level, unsettled, attempts = 0, state.target, list[Attempt]()
    if not _settle(state, state.target, level, attempts) and attempts:
        _improve(state, attempts[0])
        if attempts[0].windows.n_open_steps > EASY_STEPS:  # a better incumbent first
            level = 1
            _improve_at(state, level)
    while state.has_gap and state.seconds_left > 0:
        high = min(unsettled, state.target)
        is_near = high - state.lower_bound <= CLOSE * high
        target = high if is_near else state.lower_bound + STRIDE[level > 0] * (high - state.lower_bound)
        if is_near and unsettled == high:
            level, unsettled = level + 1, inf
            if level > 1:
                _lower_incumbent(state, level, attempts)
            _improve_at(state, level)
        elif not _settle(state, target, level, attempts):
            unsettled = target


# -- a better incumbent -----------------------------------------------------------------------------------------------


def _improve(state: SolverState, attempt: Attempt) -> None:
    """Improve an incumbent that is not settled at once, and the bound where tensors decide."""
    _anneal(state, ANNEALING_SHARE, seed=0)
    clusters, machine, end = attempt.clusters, state.machine, monotonic() + state.seconds_left / CAPACITY_SHARE
    state.enter("columns")
    high = min(attempt.target, state.target)
    bound = capacity_bound(clusters, machine, high, end)
    has_tensors = bound > state.lower_bound
    state.raise_bound(bound, "ilp")
    if has_tensors and state.has_gap:
        end = monotonic() + AVERAGE_SHARE * state.seconds_left
        state.raise_bound(average_bound(clusters, machine, clusters.time, high, end), "ilp")
    if has_tensors and state.has_gap:
        share = COLUMN_SHARE[len(clusters) > WIDE * len(machine)]
        end = monotonic() + share * state.seconds_left
        state.raise_bound(column_bound(clusters, machine, _on(state, clusters), state.lower_bound, high, end), "ilp")
    if state.bottleneck > ANCHOR_RATIO * state.lower_bound:
        state.raise_bound(anchor_bound(attempt.clusters, state.machine, state.target, state.deadline), "ilp")
    improve_by_neighbourhoods(state, 2, state.seconds_left / 6 + monotonic())
    _lower_incumbent(state, 1, [attempt])


def _improve_at(state: SolverState, level: int) -> None:
    """Improve the incumbent at an effort level: annealing leaves the local minima of neighbourhoods, and they those of annealing."""
    _anneal(state, NEIGHBOURHOOD_SHARE, seed=level)
    improve_by_neighbourhoods(state, level + 2, state.seconds_left / NEIGHBOURHOOD_SHARE + monotonic())


def _anneal(state: SolverState, divisor: int, seed: int) -> None:
    """Anneal an incumbent that is far from the bound, within a share of the seconds left."""
    if state.bottleneck > ANNEALED * state.lower_bound:
        state.enter("moves")
        end = monotonic() + state.seconds_left / divisor
        state.offer(anneal(state.clusters, state.machine, state.assignment or [], state.ranges, end, seed))


def _on(state: SolverState, clusters: Clusters) -> list[int]:
    """Return the incumbent as a cut of clusters that were merged from those of the state."""
    stage_of = state.clusters.stage_by_node(state.assignment or [])
    return [stage_of[names[0]] for names in clusters.members]


def _lower_incumbent(state: SolverState, level: int, attempts: list[Attempt]) -> None:
    """Fill stages below targets between bound and incumbent, until these are close together."""
    _refute_by_windows(state, attempts)
    low, seconds = state.lower_bound, 3**level * FILL_SECONDS
    while state.seconds_left > 0 and state.bottleneck - low > 2 * CLOSE * state.bottleneck / level:
        target = state.bottleneck - (state.bottleneck - low) / 3
        attempt = _reduce(state, target, attempts)
        if attempt is None or not any(_fill(state, attempt, seconds, forwards=side) for side in (False, True)):
            low = target


def _refute_by_windows(state: SolverState, attempts: Sequence[Attempt]) -> None:
    """Raise the bound by bisection, as far as windows alone refute targets."""
    high = state.target
    while state.seconds_left > 0 and high - state.lower_bound > CLOSE * high:
        target = (state.lower_bound + high) / 2
        if _reduce(state, target, attempts) is not None:
            high = target


def _fill(state: SolverState, attempt: Attempt, seconds: float, *, forwards: bool) -> bool:
    """Fill stages from one side. Return whether this gives a cut below the target."""
    state.enter("filling")
    clusters, windows, target = attempt.clusters, attempt.windows, attempt.target
    cut = fill_stages(clusters, state.machine, windows, target, seconds, state.deadline, forwards=forwards)
    return cut is not None and state.offer(cut, clusters, "ilp") and state.bottleneck <= target


# -- settling a target ------------------------------------------------------------------------------------------------


def _reduce(state: SolverState, target: float, attempts: Sequence[Attempt]) -> Attempt | None:
    """Return the reduced problem below a target. If it is empty, raise the bound to the target and return None."""
    state.enter("windows")
    clusters = contract(state.clusters, state.machine, target)
    windows = compute_windows(clusters, state.machine, target, state.deadline)
    for attempt in attempts:
        if attempt.target >= target:
            windows.intersect_work(attempt.windows)
    if not windows.is_empty:
        end = monotonic() + max(MIN_TIGHTENING, state.seconds_left / 6)
        tighten_windows(clusters, state.machine, windows, target, min(end, state.deadline))
    if windows.is_empty:
        state.raise_bound(target, method="ilp")
        return None
    return Attempt(target, clusters, windows)


def _settle(state: SolverState, target: float, level: int, attempts: list[Attempt]) -> bool:
    """Try windows, down-sets and the integer program on a target. Return whether the target is settled: the incumbent is
    proven optimal, or the target is refuted.
    """
    attempt = _reduce(state, target, attempts)
    if attempt is None:
        return True
    attempts.append(attempt)
    effort, clusters, windows = 3**level, attempt.clusters, attempt.windows
    state.enter("down-sets")
    cut_down_sets_below(state, target, clusters, windows, state.deadline, 20 * effort * MAX_PAIRS)
    is_small = windows.n_open_steps <= min(EASY_STEPS * 16**level, MAX_STEPS)
    if not _is_settled(state, target) and is_small and state.seconds_left > 0:
        _solve_program(state, attempt, min(effort * SECONDS, state.seconds_left))
    return _is_settled(state, target)


def _is_settled(state: SolverState, target: float) -> bool:
    return not state.has_gap or state.lower_bound >= target


def _solve_program(state: SolverState, attempt: Attempt, seconds: float) -> None:
    """Run the integer program below a target: offer its solution and raise the bound."""
    state.enter("program")
    clusters, machine, target, end = attempt.clusters, state.machine, attempt.target, monotonic() + seconds
    try:
        model = build_model(clusters, machine, attempt.windows, target, state.lower_bound, end)
    except OutOfTimeError:
        return
    while True:
        callback = lambda value, bound: state.report(value * target, bound * target)  # noqa: E731
        near = max(SOLVER_GAP, state.tolerance / 4)
        result = model.mip.minimise(model.bottleneck, end - monotonic(), gap=near, callback=callback)
        if result.values is None:
            break
        assignment = model.steps.assignment(result.values)
        state.offer(assignment, clusters, "ilp")
        if result.is_interrupted:
            raise KeyboardInterrupt
        if not _forbid_overflow(model, state, clusters, assignment) or monotonic() > end:
            break
    # the solver errs by a millionth of the target: too much if the target was far above the incumbent
    slack = 0.0 if 2 * state.bottleneck > target else SOLVER_TOLERANCE
    state.raise_bound(min(result.bound - slack, 1.0) * target, method="ilp")


def _forbid_overflow(model: PartitionModel, state: SolverState, clusters: Clusters, assignment: Sequence[int]) -> bool:
    """Forbid an assignment that fits in memory only within the solver's tolerance. Return whether that was needed."""
    loads = LoadTracker(clusters, state.machine, assignment).device_loads()
    if all(fits(load.memory, limit) for load, limit in zip(loads, state.machine.memory_limit, strict=True)):
        return False
    matches = LinearExpr()
    for v, s in enumerate(assignment):
        matches.add(model.steps.in_stage(v, s))
    model.mip.add_row(len(assignment) - 1.0, matches)
    return True
