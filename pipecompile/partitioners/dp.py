"""Cuts by dynamic programming, from cheap to thorough.

    search    orders ─▶ cut each ─▶ best
    exhaust   few down-sets ─▶ cut the whole lattice: optimal
    polish    refine ─▶ order by stage ─▶ cut ─▶ refine ─▶ ...  until nothing improves

For a chain, `search` alone is optimal. For another graph it is optimal among the cuts along these orders.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import monotonic

from pipecompile.partitioners.chain import cut
from pipecompile.partitioners.clusters import Clusters, Stages
from pipecompile.partitioners.contraction import contract
from pipecompile.partitioners.lattice import cut_lattice
from pipecompile.partitioners.loads import bottleneck
from pipecompile.partitioners.orders import orders, sorted_by
from pipecompile.partitioners.refine import refine

__all__ = ["GAP", "exhaust", "polish", "search"]

GAP = 1e-6
"""Relative distance of bottleneck and bound at which a partition counts as optimal."""


def search(clusters: Clusters, stages: Stages, bound: float, deadline: float) -> list[int] | None:
    """The best cut along any order, or None when none fits in memory. Stops early when `bound` is met."""
    best, value = None, float("inf")
    for order in orders(clusters):
        stage = cut(clusters, stages, order)
        if stage is not None and (found := bottleneck(clusters, stages, stage)) < value:
            best, value = stage, found
        if best is not None and (value <= bound or monotonic() > deadline):
            return best
    return best


def polish(clusters: Clusters, stages: Stages, incumbent: Sequence[int], deadline: float) -> list[int]:
    """A cut that neither a move nor the dynamic program along its own order improves, at worst the incumbent."""
    best, value, before = list(incumbent), bottleneck(clusters, stages, incumbent), float("inf")
    while value < before and monotonic() < deadline:
        before = value
        stage = refine(clusters, stages, best, deadline)
        stage = cut(clusters, stages, sorted_by(clusters, stage)) or stage
        if (found := bottleneck(clusters, stages, stage)) < value:
            best, value = stage, found
    return best


def exhaust(clusters: Clusters, stages: Stages, incumbent: Sequence[int]) -> tuple[list[int], float]:
    """The best cut there is, and the bound that proves it, when the graph has few down-sets; else the incumbent, and 0."""
    best = list(incumbent)
    target = bottleneck(clusters, stages, best) * (1 - GAP / 2)
    small = contract(clusters, stages, target)
    found = cut_lattice(small, stages)
    if found is None:
        return best, 0.0
    stage, bound = found
    if stage is not None:
        best = min(best, clusters.adopted(small, stage), key=lambda s: bottleneck(clusters, stages, s))
    return best, min(bound, target)
