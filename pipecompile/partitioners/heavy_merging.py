"""Coarse graphs: pairs of clusters are merged round by round, those with the longest tensors between them first.

    a ══ b ── c ══ d        {a b} ── {c d}        the best cut of the coarse graph is a cut of the graph, and good if the
    ║         │                │                  tensors inside are long
    e ─────── f             {e} ── {f}

A pair can be merged if the first leads only to the second, or the second depends only on the first: then no path leads around it,
and merging it closes no cycle. Heavy edge matching: Karypis and Kumar, "A fast and high quality multilevel scheme for partitioning
irregular graphs", 1998; of acyclic graphs: Herrmann et al., "Multilevel algorithms for acyclic partitioning of directed acyclic
graphs", 2019.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from random import Random

from pipecompile.partitioners.clusters import Clusters, adjacency, merge

__all__ = ["merge_heavy_pairs"]


def merge_heavy_pairs(
    clusters: Clusters, most: float, stage_of: Sequence[int] | None = None, draw: Random | None = None
) -> Clusters:
    """Return clusters merged into ones of at most `most` seconds of work, but for larger ones. With `stage_of`, only clusters of one
    stage are merged; with `draw`, the seconds of tensors are scaled at random, for another result each time. O(arcs) a round.
    """
    coarse = clusters
    while pairs := list(
        _matching(coarse, most, None if stage_of is None else _inherited(clusters, coarse, stage_of), draw)
    ):
        coarse = merge(coarse, pairs)
    return coarse


def _inherited(clusters: Clusters, coarse: Clusters, stage_of: Sequence[int]) -> list[int]:
    """Return the stage of every coarse cluster."""
    stage_of_name = {name: s for names, s in zip(clusters.members, stage_of, strict=True) for name in names}
    return [stage_of_name[names[0]] for names in coarse.members]


def _matching(
    clusters: Clusters, most: float, stage_of: Sequence[int] | None, draw: Random | None
) -> Iterator[tuple[int, int]]:
    """Yield pairs that can be merged, each cluster at most once."""
    predecessors, successors = adjacency(clusters)
    seconds, free = _seconds_between(clusters), [True] * len(clusters)
    if draw is not None:
        seconds = {pair: time * draw.uniform(0.2, 1.8) for pair, time in seconds.items()}
    for a, b in sorted(clusters.arcs, key=lambda pair: -seconds.get(pair, 0.0)):
        is_only = len(successors[a]) == 1 or len(predecessors[b]) == 1
        is_together = stage_of is None or stage_of[a] == stage_of[b]
        fits = clusters.time[a] + clusters.time[b] <= most and (a, b) not in clusters.strict_arcs
        if free[a] and free[b] and is_only and is_together and fits:
            free[a] = free[b] = False
            yield a, b


def _seconds_between(clusters: Clusters) -> dict[tuple[int, int], float]:
    """Return the seconds of the tensors between two clusters, with an equal share of each tensor for each consumer."""
    seconds: defaultdict[tuple[int, int], float] = defaultdict(float)
    for flow in clusters.flows:
        for consumer in flow.consumers:
            seconds[min(flow.source, consumer), max(flow.source, consumer)] += flow.time / len(flow.consumers)
    return dict(seconds)
