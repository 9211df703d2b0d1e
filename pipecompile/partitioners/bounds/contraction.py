"""Melt what no cut below a target can separate: what makes the integer program small.

     u ══ 40 ══▶ v        target 70: apart, the stage of u would take 35 + 40, so u and v share a stage.
    35          10

If u and v are apart, the stage of u computes u and moves every tensor between the two. When that alone reaches the target
for u or for v, every better cut keeps them together. Merging makes clusters heavier, so this goes on until nothing moves.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from pipecompile.partitioners.clusters import Clusters, merge
from pipecompile.partitioners.machine import Stages

__all__ = ["contract"]


def contract(clusters: Clusters, stages: Stages, target: float) -> Clusters:
    """Clusters whose every cut below the target is one of the given clusters', and the other way round."""
    while pairs := list(_inseparable(clusters, stages, target)):
        clusters = merge(clusters, pairs)
    return clusters


def _inseparable(clusters: Clusters, stages: Stages, target: float) -> Iterator[tuple[int, int]]:
    between: defaultdict[tuple[int, int], float] = defaultdict(float)  # sent by the first if they are apart
    price = stages.cheapest
    for flow in clusters.flows if price else ():
        for consumer in flow.consumers:
            between[flow.source, consumer] += flow.time * price
    fastest = max(stages.speed)
    for a, b in {(min(pair), max(pair)) for pair in between}:
        there, back = between.get((a, b), 0.0), between.get((b, a), 0.0)
        work = max(clusters.time[a], clusters.time[b]) / fastest
        if (max(work, there, back) if stages.overlap else work + there + back) >= target:
            yield a, b
