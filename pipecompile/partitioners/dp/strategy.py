"""Cuts by dynamic programming, from cheap to thorough.

    along_orders    orders ─▶ cut each ─▶ best
    exhaust         few down-sets ─▶ cut the whole lattice: optimal
    polish          moves ─▶ order by stage ─▶ cut ─▶ moves ─▶ ...  until nothing improves

For a chain, the first is optimal. For another graph it is optimal among the cuts along these orders.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from time import monotonic

from pipecompile.partitioners.bounds.contraction import contract
from pipecompile.partitioners.bounds.stage_windows import Windows, windows
from pipecompile.partitioners.clusters import Clusters
from pipecompile.partitioners.dp.down_sets import PAIRS, bands, cut_lattice
from pipecompile.partitioners.dp.linear_order import cut
from pipecompile.partitioners.dp.topological_orders import orders, sorted_by
from pipecompile.partitioners.incumbent import Search
from pipecompile.partitioners.local_search import refine

__all__ = ["along_orders", "exhaust", "polish"]

ROOMY = 1.25
"""The first guess of the bottleneck, as a multiple of its bound."""

SHORT = 1000
"""Clusters up to which an order is cut without a guess."""


def along_orders(search: Search, deadline: float) -> None:
    """Offer the best cut of every order. Stops early when the bound is met, or when there is no other order."""
    clusters, stages = search.clusters, search.stages
    for order in orders(clusters, search.span):
        cap = search.value if search.stage is not None else inf if len(order) <= SHORT else ROOMY * search.bound
        while (stage := cut(clusters, stages, order, search.span, cap)) is None and cap < sum(clusters.time):
            if search.stage is not None:
                break
            cap *= 2
        if stage is not None:
            search.offer(stage, method="dp")
        if search.stage is not None and _only(order, search):
            search.prove(search.value, "dp")
        if search.stage is not None and (not search.open or monotonic() > deadline):
            return


def _only(order: Sequence[int], search: Search) -> bool:
    """Whether this is the one order there is, a chain, and its best cut is charged as the objective says."""
    stages, arcs = search.stages, set(search.clusters.arcs)
    once = stages.multicast or all(len(flow.consumers) == 1 for flow in search.clusters.flows)
    plain = once and stages.direct and stages.links is None
    return plain and all(pair in arcs for pair in zip(order, order[1:], strict=False))


def polish(search: Search, deadline: float) -> None:
    """Improve the best cut until neither a move nor the dynamic program along its own order does."""
    search.enter("moves")
    better = search.stage is not None
    while better and search.stage is not None and search.open and monotonic() < deadline:
        better = search.offer(refine(search.clusters, search.stages, search.stage, search.span, deadline))
        order = sorted_by(search.clusters, search.stage, search.span)
        stage = cut(search.clusters, search.stages, order, search.span, search.value)
        better = (stage is not None and search.offer(stage)) or better


def exhaust(search: Search) -> None:
    """Find the best cut there is, and prove it, when the graph has few down-sets and stages are devices of their own."""
    search.enter("lattice")
    if search.stage is None or not search.stages.direct or search.stages.links is not None:
        return
    target = search.target
    small = contract(search.clusters, search.stages, target)
    left = windows(small, search.stages, target)
    sweep(search, target, small, left)


def sweep(search: Search, target: float, clusters: Clusters, left: Windows, pairs: int = PAIRS) -> bool:
    """Cut the lattice below a target within these windows. Whether it was small enough."""
    if not search.stages.direct or search.stages.links is not None:
        return False
    found = [] if left.empty else bands(clusters, left, len(search.stages))
    if found is None:
        return False
    cut_below = cut_lattice(clusters, search.stages, found, target, pairs, search.deadline) if found else (None, inf)
    if cut_below is None:
        return False
    stage, bound = cut_below
    if stage is not None:
        search.offer(stage, clusters, "dp")
    search.prove(min(bound, target), "dp")
    return True
