"""Reachability in the precedence graph of clusters: adjacency, transitive closure and reduction, sums over ancestors.

A cluster counts as an ancestor and a descendant of itself.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pipecompile.partitioners.clusters import Clusters

__all__ = ["adjacency", "head_and_tail_sums", "transitive_closure", "transitive_reduction"]

BLOCK = 2048
"""Columns of the closure that are held at a time: clusters * BLOCK bytes."""


def adjacency(clusters: Clusters) -> tuple[list[list[int]], list[list[int]]]:
    """Return the direct predecessors and the direct successors of every cluster."""
    predecessors: list[list[int]] = [[] for _ in range(len(clusters))]
    successors: list[list[int]] = [[] for _ in range(len(clusters))]
    for a, b in clusters.arcs:
        predecessors[b].append(a)
        successors[a].append(b)
    return predecessors, successors


def transitive_closure(clusters: Clusters) -> NDArray[np.bool_]:
    """Return the matrix with [a, b] true iff a is an ancestor of b. O(clusters * arcs) bytes are moved."""
    return _closure_columns(clusters, 0, len(clusters))


def head_and_tail_sums(
    clusters: Clusters, columns: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Sum `columns` (columns, clusters): [c, v] of the first result over the ancestors of v, of the second over its
    descendants.
    """
    head, tail = np.zeros(columns.shape), np.zeros(columns.shape)
    for start in range(0, len(clusters), BLOCK):
        stop = min(start + BLOCK, len(clusters))
        closure = _closure_columns(clusters, start, stop).astype(np.float64)
        head[:, start:stop] = columns @ closure
        tail += columns[:, start:stop] @ closure.T
    return head, tail


def transitive_reduction(clusters: Clusters) -> list[tuple[int, int]]:
    """Return the arcs that do not follow from other arcs; all arcs if there are more than `BLOCK` clusters."""
    if len(clusters) > BLOCK:
        return list(clusters.arcs)
    closure = transitive_closure(clusters)
    proper = closure & ~np.eye(len(clusters), dtype=bool)
    _, successors = adjacency(clusters)
    return [(a, b) for a, b in clusters.arcs if not proper[successors[a], b].any()]


def _closure_columns(clusters: Clusters, start: int, stop: int) -> NDArray[np.bool_]:
    """Return columns `start` to `stop` of the transitive closure. Clusters are in topological order."""
    closure = np.zeros((len(clusters), stop - start), dtype=bool)
    closure[np.arange(start, stop), np.arange(stop - start)] = True
    _, successors = adjacency(clusters)
    for a in reversed(range(stop)):
        for b in successors[a]:
            if b < stop:
                closure[a] |= closure[b]
    return closure
