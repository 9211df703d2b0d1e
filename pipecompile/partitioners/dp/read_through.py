"""Clusters that are read through: views and copies of a table off the main path that several clusters read.

    table ─▶ view ─┬─▶ q        read through       table ─┬─▶ q
                   ╰─▶ k        ───────────▶              ╰─▶ k

Each layer of a decoder has a view of its own of the table of rotary embeddings, for its queries and keys: each view multiplies the
down-sets. A cluster is read through if each tensor of it is no less than all that it reads. Without it no stage has more load, if
the stage of the table sends it once, as a relay (`side_branches.py`), and its work is left to any stage. So a bound without it is a
bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf

import numpy as np
from numpy.typing import NDArray

from pipecompile.partitioners.clusters import Clusters, Flow, restricted
from pipecompile.partitioners.dp.side_branches import JoinedBranches, main_clusters

__all__ = ["ReadThrough", "read_through"]

MOST_READERS = 4
"""Readers of a cluster that is read through. A table that all layers read stays: its stage sends it to all others."""


@dataclass(frozen=True, slots=True)
class ReadThrough:
    """The branches without the clusters that are read through; the numbers of those left; per one that is not, its readers. `work` has
    the seconds of the latter at speed 1.
    """

    branches: JoinedBranches
    kept: tuple[int, ...]
    readers: dict[int, tuple[int, ...]]
    work: float

    def place(self, assignment: Sequence[int]) -> list[int]:
        """Return the stage of every cluster, where those left have the given stages: that of its first reader."""
        stage_of = dict(zip(self.kept, assignment, strict=True))
        for v in sorted(self.readers, reverse=True):
            stage_of[v] = min(stage_of[reader] for reader in self.readers[v])
        return [stage_of[v] for v in range(len(stage_of))]


def read_through(branches: JoinedBranches, most: float) -> ReadThrough:
    """Return the branches without clusters that are read through, of which each takes at most `most` seconds with all before it."""
    clusters = branches.clusters
    is_main = main_clusters(clusters)
    readers = _readers(clusters, is_main, _candidates(clusters, is_main, most))
    kept = [v for v in range(len(clusters)) if v not in readers]
    if not readers:
        return ReadThrough(branches, tuple(kept), {}, 0.0)
    direct = replace(clusters, flows=_direct(clusters.flows, readers), arcs=_arcs(clusters, readers))
    index = {old: new for new, old in enumerate(kept)}
    sources = {flow.source for flow in clusters.flows if any(consumer in readers for consumer in flow.consumers)}
    relays = frozenset(index[v] for v in branches.relays | sources if v in index)
    rest = replace(branches, clusters=restricted(direct, kept), relief=branches.relief[kept], relays=relays)
    return ReadThrough(rest, tuple(kept), readers, sum(clusters.time[v] for v in readers))


def _candidates(clusters: Clusters, is_main: NDArray[np.bool_], most: float) -> list[int]:
    """Return the clusters off the main path of which no tensor is less than all that they read, and that take at most `most` seconds with
    all before them.
    """
    n = len(clusters)
    read, least, before = [0.0] * n, [inf] * n, [{v} for v in range(n)]
    for flow in sorted(clusters.flows, key=lambda flow: flow.source):
        least[flow.source] = min(least[flow.source], flow.time)
        for consumer in flow.consumers:
            read[consumer] += flow.time
            before[consumer] |= before[flow.source]
    return [
        v
        for v in range(n)
        if not is_main[v] and least[v] >= read[v] and sum(clusters.time[u] for u in before[v]) <= most
    ]


def _readers(clusters: Clusters, is_main: NDArray[np.bool_], candidates: Sequence[int]) -> dict[int, tuple[int, ...]]:
    """Return the readers of each candidate that has few, on the main path, where all that must come after it reads it."""
    after: dict[int, set[int]] = {v: set() for v in candidates}
    readers: dict[int, set[int]] = {v: set() for v in candidates}
    for a, b in clusters.arcs:
        if a in after:
            after[a].add(b)
    for flow in clusters.flows:
        if flow.source in readers:
            readers[flow.source].update(flow.consumers)
    taken: dict[int, tuple[int, ...]] = {}
    for v in sorted(candidates, reverse=True):  # readers before what they read
        if readers[v] and after[v] == readers[v]:
            taken[v] = tuple(sorted(readers[v]))
            final = _final(v, taken)
            if len(final) > MOST_READERS or not all(is_main[reader] for reader in final):
                del taken[v]
    return taken


def _final(v: int, readers: dict[int, tuple[int, ...]]) -> set[int]:
    """Return the clusters that are left and read a cluster through others."""
    return {v} if v not in readers else set().union(*(_final(reader, readers) for reader in readers[v]))


def _direct(flows: Sequence[Flow], readers: dict[int, tuple[int, ...]]) -> tuple[Flow, ...]:
    """Return the flows of clusters that are left, to all that read them through others."""
    return tuple(
        replace(flow, consumers=tuple(sorted(set().union(*(_final(consumer, readers) for consumer in flow.consumers)))))
        for flow in flows
        if flow.source not in readers
    )


def _arcs(clusters: Clusters, readers: dict[int, tuple[int, ...]]) -> tuple[tuple[int, int], ...]:
    """Return the arcs of clusters that are left, to all that come after them through others."""
    pairs = {(a, final) for a, b in clusters.arcs if a not in readers for final in _final(b, readers)}
    return tuple(sorted(pairs))
