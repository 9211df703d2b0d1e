"""Descent from a cut: move single clusters between stages, as far as precedence and memory let them.

    stage    0        1        2
           [a b] c ─▶ [d e]    [f]        c may go to 1 when all that reads it is in 1 or later

Only clusters of the fullest stages are tried. Better is: a smaller bottleneck, then fewer stages at it, then a smaller sum
of loads. Each step costs O(clusters + tensors); the deadline ends it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from time import monotonic

from pipecompile.partitioners.clusters import Clusters, Stages
from pipecompile.partitioners.loads import fits, loads
from pipecompile.partitioners.orders import neighbours

__all__ = ["refine"]

Score = tuple[float, int, float]


def refine(clusters: Clusters, stages: Stages, stage: Sequence[int], deadline: float) -> list[int]:
    """A cut in which no single move helps, at worst the given one."""
    best, score = list(stage), _score(clusters, stages, stage)
    around = neighbours(clusters)
    moved = True
    while moved:
        moved = False
        for cluster, s in list(_moves(clusters, stages, best, around)):
            if monotonic() > deadline:
                return best
            tried = [*best]
            tried[cluster] = s
            if _legal(tried, cluster, around) and (better := _score(clusters, stages, tried)) < score:
                best, score, moved = tried, better, True
    return best


def _moves(clusters: Clusters, stages: Stages, stage: Sequence[int], around: tuple[list[list[int]], list[list[int]]]
           ) -> Iterator[tuple[int, int]]:  # fmt: skip
    load = [row.load for row in loads(clusters, stages, stage)]
    before, after = around
    for cluster, s in enumerate(stage):
        first = max((stage[other] for other in before[cluster]), default=0)
        last = min((stage[other] for other in after[cluster]), default=len(stages) - 1)
        if load[s] >= max(load) * (1 - 1e-12):
            yield from ((cluster, other) for other in range(first, last + 1) if other != s)


def _legal(stage: Sequence[int], cluster: int, around: tuple[list[list[int]], list[list[int]]]) -> bool:
    before, after = around
    return all(stage[a] <= stage[cluster] for a in before[cluster]) and all(
        stage[cluster] <= stage[b] for b in after[cluster]
    )


def _score(clusters: Clusters, stages: Stages, stage: Sequence[int]) -> Score:
    rows = loads(clusters, stages, stage)
    if not all(fits(row.memory, limit) for row, limit in zip(rows, stages.limit, strict=True)):
        return float("inf"), 0, 0.0
    worst = max(row.load for row in rows)
    return worst, sum(row.load >= worst * (1 - 1e-12) for row in rows), sum(row.load for row in rows)
