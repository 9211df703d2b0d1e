"""The solver: lower bound, dynamic program, integer program, in this order, until bound and incumbent meet."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import fsum
from numbers import Real
from time import monotonic
from typing import Literal

from pipecompile.errors import InputError
from pipecompile.partitioners.clusters import Clusters, coarsen, singleton_clusters
from pipecompile.partitioners.constraints import check_constraints
from pipecompile.partitioners.dp.alike_stages import cut_alike_stages
from pipecompile.partitioners.dp.coarse_graphs import cut_coarse_graphs, recut_coarse_graphs
from pipecompile.partitioners.dp.strategy import SHORT_ORDER, cut_all_down_sets, cut_candidate_orders, polish
from pipecompile.partitioners.dp.target_programs import cut_chain_with_copies, fill_between
from pipecompile.partitioners.ilp.anchored_stages import cut_bound
from pipecompile.partitioners.ilp.feasibility import find_fitting_cut
from pipecompile.partitioners.ilp.target_search import close_gap
from pipecompile.partitioners.incumbent import GAP, GOOD, ProgressCallback, SolverState
from pipecompile.partitioners.machine import Machine
from pipecompile.partitioners.objective import LoadTracker
from pipecompile.partitioners.problem import Problem
from pipecompile.partitioners.rebalance import fill_empty_stages
from pipecompile.partitioners.stage_paths import shorten_paths
from pipecompile.partitioners.verify import verify_assignment, verify_problem
from pipecompile.text.input_checks import amount, check_kind, float_of, whole
from pipecompile.text.shown_value import shown

__all__ = ["METHODS", "Partition", "partition", "trivial_lower_bound", "with_cut"]


METHODS = ("auto", "dp", "ilp")

MOST_STAGES = 10_000
"""Stages of a partition. A pipeline has no more."""

CHAIN_SHARE = 0.75
"""Share of the time limit for a chain of which senders pay for every receiver."""

FILL_SHARE = 0.6
"""Share of the seconds left that stay for the integer programs when stages are filled by dynamic programs."""

COARSE_REST = 0.65
"""Share of the seconds left that stay after cuts of coarse graphs, before stages are filled and once more after."""

FILL_SECONDS = 1.0
"""Seconds for the filling of empty stages when the time limit has ended."""

PATH_SECONDS = 1.0
"""Most seconds for moves that let stages run beside each other, at the same bottleneck."""

LEAST_PATH_SECONDS = 0.1
"""Seconds for these moves after the time limit: small problems need no more."""


@dataclass(frozen=True, slots=True)
class Partition:
    """The stage of every node, and which stages recompute. Times are in seconds.

    No partition has a bottleneck below `lower_bound`. `status` is "optimal" if bottleneck and bound agree to one part in a
    million. `method` is the one that produced the cut or closed the gap.
    """

    stage_of: dict[str, int]
    bottleneck: float
    lower_bound: float
    status: Literal["optimal", "feasible"]
    method: str
    seconds: float
    recompute: tuple[bool, ...] = ()

    def __repr__(self) -> str:
        figures = f"bottleneck={self.bottleneck:.3g} s, gap={self.gap:.1%}, {self.status}"
        return f"Partition(n_nodes={len(self.stage_of)}, {figures}, {self.method})"

    @property
    def gap(self) -> float:
        """The relative gap: the most by which the bottleneck is above the optimum, as a fraction of the bottleneck."""
        return (self.bottleneck - self.lower_bound) / self.bottleneck if self.bottleneck else 0.0

    def verify(self, problem: Problem, n_stages: int) -> None:
        """Raise VerifyError with every fault: coverage, range, precedence, groups, constraints, memory. Raise InputError for other
        arguments.
        """
        check_kind(problem, Problem, "partition.verify(problem, 2)")
        whole("n_stages", n_stages, 1, MOST_STAGES)
        verify_problem(problem)
        verify_assignment(problem, self.stage_of, n_stages, self.recompute or None)


def partition(
    problem: Problem,
    n_stages: int,
    *,
    method: str = "auto",
    time_limit: float = 30.0,
    gap: float = GOOD,
    progress: ProgressCallback | None = None,
) -> Partition:
    """Cut a problem into ordered stages and minimise the bottleneck within `time_limit` seconds.

    The search ends earlier if the bottleneck is proven to be at most the fraction `gap` above the least there can be; gap=0 searches
    for the proof that there is none below. The dynamic programs of small problems always run to their end.

    "dp" is dynamic programming alone: optimal, with proof, for chains and for graphs with few down-sets. "ilp" is the integer
    program, started from a cut of a linear order. "auto" is "dp", then "ilp" if a gap is left. Tarnawski et al.,
    "Efficient algorithms for device placement of DNN graph operators", 2020.

    `progress` is called with a `Progress`. Ctrl-C acts as the time limit does: the search ends with the incumbent and its
    bound; before the first incumbent it raises KeyboardInterrupt.

    Raise VerifyError if the problem is illegal, InfeasibleError if it is proven that no cut fits in memory or meets the
    constraints.
    """
    begin = monotonic()
    _check_arguments(problem, n_stages, method, time_limit, gap, progress)
    verify_problem(problem)
    problem = problem.plain()
    clusters, machine = coarsen(problem), Machine.of(problem, n_stages)
    if clusters.is_constrained:
        check_constraints(problem, clusters, n_stages)
    if not len(clusters):
        return Partition({}, 0.0, 0.0, "optimal", "dp", monotonic() - begin, (False,) * n_stages)
    seconds = float_of(time_limit)  # type: ignore[arg-type]
    state = SolverState(clusters, machine, begin, seconds, progress)
    try:
        _solve(state, method, seconds, gap)
    except KeyboardInterrupt:
        if state.assignment is None:
            raise
    return _result(state)


def _solve(state: SolverState, method: str, time_limit: float, gap: float) -> None:
    early_deadline = state.begin + time_limit / 4
    is_small = len(state.clusters) <= SHORT_ORDER
    state.tolerance = GAP if is_small else max(GAP, gap)
    state.enter("orders")
    state.raise_bound(trivial_lower_bound(state.clusters, state.machine))
    cut_candidate_orders(state, state.begin + time_limit / 10)
    if state.assignment is None:
        state.offer(find_fitting_cut(state.clusters, state.machine, state.deadline))
    if method != "ilp":
        cut_alike_stages(state, max(GAP, gap), state.begin + time_limit / 2, early_deadline)
    is_counted = state.has_gap and _cut_chain(state, time_limit, max(GAP, gap))
    if method != "ilp" and state.has_gap and not is_counted:
        cut_all_down_sets(state, early_deadline)
    state.tolerance = max(GAP, gap)
    if method != "dp" and state.has_gap:
        _raise_bound_by_anchors(state, state.begin + time_limit / 2)
    if state.has_gap:
        polish(state, early_deadline)
        cut_coarse_graphs(state, state.deadline - COARSE_REST * state.seconds_left)
        fill_between(state, state.deadline - FILL_SHARE * state.seconds_left)
        recut_coarse_graphs(state, state.deadline - COARSE_REST * state.seconds_left)
    if method != "dp" and state.has_gap:
        close_gap(state)


def _cut_chain(state: SolverState, time_limit: float, tolerance: float) -> bool:
    """Cut a chain with several receivers to a tolerance, then to that of the state while it is early. Return whether the problem is
    one, and no target had too many suffixes: then the program over down-sets, which counts receivers once, adds nothing.
    """
    before, state.tolerance = state.tolerance, tolerance
    is_counted = cut_chain_with_copies(state, state.begin + CHAIN_SHARE * time_limit)
    state.tolerance = before
    return is_counted and (not state.has_gap or cut_chain_with_copies(state, state.begin + time_limit / 4))


def _raise_bound_by_anchors(state: SolverState, deadline: float) -> None:
    state.raise_bound(cut_bound(state.clusters, state.machine, state.lower_bound, state.bottleneck, deadline), "ilp")


def _result(state: SolverState) -> Partition:
    assignment, state.tolerance = list(state.assignment or []), GAP
    if len(set(assignment)) < len(state.machine):
        end = max(state.deadline, monotonic() + FILL_SECONDS)
        assignment = fill_empty_stages(state.clusters, state.machine, assignment, end)
    if len(state.machine) > 2:  # fewer stages are a chain
        end = monotonic() + max(LEAST_PATH_SECONDS, min(PATH_SECONDS, state.seconds_left))
        assignment = shorten_paths(state.clusters, state.machine, assignment, state.ranges, end)
    tracker = LoadTracker(state.clusters, state.machine, assignment)
    worst = tracker.bottleneck()  # filled and shortened cuts differ by rounding
    status: Literal["optimal", "feasible"] = "feasible" if state.has_gap else "optimal"
    bound = min(state.lower_bound, worst) if state.has_gap else worst
    return Partition(
        stage_of=state.clusters.stage_by_node(assignment),
        bottleneck=float(worst),
        lower_bound=float(bound),
        status=status,
        method=state.method,
        seconds=monotonic() - state.begin,
        recompute=tracker.recompute(),
    )


def _check_arguments(
    problem: Problem, n_stages: int, method: str, time_limit: float, gap: float, progress: ProgressCallback | None
) -> None:
    check_kind(problem, Problem, "pc.partition(pipe.problem, n_stages)")
    if progress is not None and not callable(progress):
        raise InputError(f"progress={shown(progress)} is not a function", hint="progress=print")
    if not isinstance(n_stages, int) or isinstance(n_stages, bool) or n_stages < 1:
        raise InputError(f"n_stages is {shown(n_stages)}, expected an integer of at least 1", hint="n_stages=2")
    if n_stages > MOST_STAGES:
        raise InputError(f"n_stages is {shown(n_stages)}, expected at most {MOST_STAGES:,}", hint="n_stages=8")
    if not isinstance(method, str) or method not in METHODS:
        raise InputError(f"method is {shown(method)}, which is unknown", hint=f"one of {', '.join(map(repr, METHODS))}")
    amount("time_limit", time_limit, zero=False, finite=False)
    if not (isinstance(gap, Real) and 0 <= gap < 1):
        raise InputError(f"gap is {shown(gap)}, expected a fraction from 0 to below 1", hint=f"gap={GOOD}")


def with_cut(partition: Partition, problem: Problem, stage_of: Mapping[str, int], n_stages: int) -> Partition:
    """Return another cut of the same problem, chosen by its step. The bound on the bottleneck stays."""
    machine = Machine.of(problem, n_stages)
    tracker = LoadTracker(singleton_clusters(problem), machine, [stage_of[node.name] for node in problem.nodes])
    worst, bound = tracker.bottleneck(), partition.lower_bound
    is_optimal = worst - bound <= GAP * worst
    return replace(
        partition, stage_of=dict(stage_of), bottleneck=worst, status="optimal" if is_optimal else "feasible", method="step",
        recompute=tracker.recompute(),
    )  # fmt: skip


def trivial_lower_bound(clusters: Clusters, machine: Machine) -> float:
    """Return the larger of two bounds: total work over total speed, largest cluster over largest speed. O(clusters)."""
    speeds = [machine.speed[d] for d in set(machine.device_of)]
    average = fsum(clusters.time) / fsum(speeds)
    return max(average, max(clusters.time, default=0.0) / max(speeds)) * (1 - 1e-12)
