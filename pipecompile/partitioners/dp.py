"""A cut by dynamic programming: exact along each of several linear orders, then refined, then along the order that gives.

    orders ─▶ cut each ─▶ best ─▶ refine ─▶ order by stage ─▶ cut ─▶ ...  until nothing improves

For a chain this is optimal. For another graph it is optimal among the cuts along these orders.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from time import monotonic

from pipecompile.partitioners.chain import cut
from pipecompile.partitioners.clusters import Clusters, Stages
from pipecompile.partitioners.loads import fits, loads
from pipecompile.partitioners.orders import orders, sorted_by
from pipecompile.partitioners.refine import refine

__all__ = ["bottleneck", "search"]


def bottleneck(clusters: Clusters, stages: Stages, stage: Sequence[int]) -> float:
    """The largest load of an assignment; infinite when it does not fit in memory."""
    rows = loads(clusters, stages, stage)
    if not all(fits(row.memory, limit) for row, limit in zip(rows, stages.limit, strict=True)):
        return float("inf")
    return max(row.load for row in rows)


def search(clusters: Clusters, stages: Stages, bound: float, deadline: float, start: Sequence[int] | None = None) -> list[int] | None:
    """The best cut found, or None when none was found that fits in memory. Stops early when `bound` is met."""
    best, value = (list(start), bottleneck(clusters, stages, start)) if start is not None else (None, float("inf"))
    further = (sorted_by(clusters, start) for _ in range(1) if start is not None)
    for order in chain(further, orders(clusters)):
        stage = cut(clusters, stages, order)
        if stage is not None and (found := bottleneck(clusters, stages, stage)) < value:
            best, value = stage, found
        if best is not None and (value <= bound or monotonic() > deadline):
            return best
    while best is not None and value > bound and monotonic() < deadline:
        stage = refine(clusters, stages, best, deadline)
        stage = cut(clusters, stages, sorted_by(clusters, stage)) or stage
        stage, before = refine(clusters, stages, stage, deadline), value
        if (found := bottleneck(clusters, stages, stage)) < value:
            best, value = stage, found
        if value >= before:
            return best
    return best
