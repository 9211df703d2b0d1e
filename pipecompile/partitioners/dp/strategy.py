"""Strategy of the dynamic programs, from cheap to thorough.

    cut_candidate_orders   candidate orders ─▶ cut each ─▶ best
    cut_all_down_sets      few down-sets ─▶ cut over all of them: optimal
    polish                 local search ─▶ order by stage ─▶ cut ─▶ local search ─▶ ...  until nothing improves

The first is optimal for a chain. For another graph it is optimal among the cuts along these orders.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from time import monotonic

from pipecompile.partitioners.bounds.separations import contract
from pipecompile.partitioners.bounds.stage_windows import StageWindows, compute_windows
from pipecompile.partitioners.clusters import Clusters
from pipecompile.partitioners.dp.chain_partition import cut_order
from pipecompile.partitioners.dp.down_sets import MAX_PAIRS, cut_down_sets, enumerate_down_sets
from pipecompile.partitioners.dp.topological_orders import candidate_orders, order_by_key
from pipecompile.partitioners.incumbent import SolverState
from pipecompile.partitioners.local_search import descend

__all__ = ["cut_all_down_sets", "cut_candidate_orders", "cut_down_sets_below", "polish"]

FIRST_CAP = 1.25
"""The first cap on the bottleneck of a long order, as a multiple of the lower bound; doubled until a cut exists."""

SHORT_ORDER = 1000
"""Clusters up to which an order is cut without a cap."""


def cut_candidate_orders(state: SolverState, deadline: float) -> None:
    """Offer the best cut of every candidate order. Stop if the bound is met or no other order exists."""
    clusters, machine = state.clusters, state.machine
    for order in candidate_orders(clusters, state.ranges):
        cap = inf if len(order) <= SHORT_ORDER else FIRST_CAP * state.lower_bound
        cap = state.bottleneck if state.assignment is not None else cap
        while (cut := cut_order(clusters, machine, order, state.ranges, cap)) is None and cap < sum(clusters.time):
            if state.assignment is not None:
                break
            cap *= 2
        if cut is not None:
            state.offer(cut, method="dp")
        if state.assignment is not None and _is_exact(order, state):
            state.raise_bound(state.bottleneck, "dp")
        if state.assignment is not None and (not state.has_gap or monotonic() > deadline):
            return


def _is_exact(order: Sequence[int], state: SolverState) -> bool:
    """Return whether the order is the only one, a chain, and its cut is charged exactly as the objective says."""
    machine, arcs = state.machine, set(state.clusters.arcs)
    sent_once = machine.multicast or all(len(flow.consumers) == 1 for flow in state.clusters.flows)
    exact_loads = sent_once and machine.is_one_to_one and machine.links is None
    return exact_loads and all(pair in arcs for pair in zip(order, order[1:], strict=False))


def polish(state: SolverState, deadline: float) -> None:
    """Improve the incumbent until neither local search nor the best cut of its own order does."""
    state.enter("moves")
    improved = state.assignment is not None
    while improved and state.assignment is not None and state.has_gap and monotonic() < deadline:
        improved = state.offer(descend(state.clusters, state.machine, state.assignment, state.ranges, deadline))
        order = order_by_key(state.clusters, state.assignment, state.ranges)
        cut = cut_order(state.clusters, state.machine, order, state.ranges, state.bottleneck)
        improved = (cut is not None and state.offer(cut)) or improved


def cut_all_down_sets(state: SolverState) -> None:
    """Find the optimum and prove it, if the graph has few down-sets and every stage is a device of its own."""
    state.enter("down-sets")
    if state.assignment is None or not state.machine.is_one_to_one or state.machine.links is not None:
        return
    target = state.target
    contracted = contract(state.clusters, state.machine, target)
    windows = compute_windows(contracted, state.machine, target)
    cut_down_sets_below(state, target, contracted, windows)


def cut_down_sets_below(
    state: SolverState, target: float, clusters: Clusters, windows: StageWindows, max_pairs: int = MAX_PAIRS
) -> bool:
    """Cut over the down-sets within the windows of a target: offer the cut, raise the bound. Return False if there are too
    many down-sets.
    """
    if not state.machine.is_one_to_one or state.machine.links is not None:
        return False
    down_sets = [] if windows.is_empty else enumerate_down_sets(clusters, windows, len(state.machine))
    if down_sets is None:
        return False
    result = (
        cut_down_sets(clusters, state.machine, down_sets, target, max_pairs, state.deadline)
        if down_sets
        else (None, inf)
    )
    if result is None:
        return False
    cut, bound = result
    if cut is not None:
        state.offer(cut, clusters, "dp")
    state.raise_bound(min(bound, target), "dp")
    return True
