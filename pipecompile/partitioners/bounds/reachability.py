"""Who comes before whom: ancestors and descendants of clusters, in bulk."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pipecompile.partitioners.clusters import Clusters

__all__ = ["around", "neighbours", "reachable", "skeleton"]

BLOCK = 2048
"""Clusters whose ancestors are held at a time: clusters * BLOCK bytes."""


def neighbours(clusters: Clusters) -> tuple[list[list[int]], list[list[int]]]:
    """Direct predecessors and direct successors of every cluster."""
    before: list[list[int]] = [[] for _ in range(len(clusters))]
    after: list[list[int]] = [[] for _ in range(len(clusters))]
    for a, b in clusters.arcs:
        before[b].append(a)
        after[a].append(b)
    return before, after


def reachable(clusters: Clusters) -> NDArray[np.bool_]:
    """[a, b] is true when a = b or a comes before b. O(clusters * arcs) bytes moved."""
    return _reaching(clusters, 0, len(clusters))


def around(clusters: Clusters, columns: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """[c, v] is the sum of column c over v and what comes before it; and over v and what comes after it."""
    before, after = np.zeros(columns.shape), np.zeros(columns.shape)
    for start in range(0, len(clusters), BLOCK):
        stop = min(start + BLOCK, len(clusters))
        reach = _reaching(clusters, start, stop).astype(np.float64)
        before[:, start:stop] = columns @ reach
        after += columns[:, start:stop] @ reach.T
    return before, after


def skeleton(clusters: Clusters) -> list[tuple[int, int]]:
    """The arcs that do not follow from others: transitive reduction, when the graph is small enough to afford it."""
    if len(clusters) > BLOCK:
        return list(clusters.arcs)
    reach = reachable(clusters)
    proper = reach & ~np.eye(len(clusters), dtype=bool)
    _, after = neighbours(clusters)
    return [(a, b) for a, b in clusters.arcs if not proper[after[a], b].any()]


def _reaching(clusters: Clusters, start: int, stop: int) -> NDArray[np.bool_]:
    """The columns start to stop of the whole relation; clusters are in topological order."""
    reach = np.zeros((len(clusters), stop - start), dtype=bool)
    reach[np.arange(start, stop), np.arange(stop - start)] = True
    _, after = neighbours(clusters)
    for a in reversed(range(stop)):
        for b in after[a]:
            if b < stop:
                reach[a] |= reach[b]
    return reach
