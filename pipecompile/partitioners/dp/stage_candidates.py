"""Candidate stages: pairs of down-sets whose difference is a stage within a target, for stages that are all alike.

    {} ─▶ {a} ─▶ {a b} ─▶ ...       a stage is what lies between two down-sets, one inside the other:
     ╰─────▶──────╯                 {} to {a b} is the stage {a b}

Where stages are alike it does not matter which number a stage has: each pair is looked at once, and not once for each number, as in
`down_sets.py`. Networks of blocks in a row have few down-sets: ResNet-152 355, a transformer of 48 layers 1881.

The load of a candidate counts each tensor that leaves it once. What a sender pays more for several receivers is left to `fewest_stages.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from time import monotonic

import numpy as np
from numpy.typing import NDArray

from pipecompile.partitioners.clusters import Clusters
from pipecompile.partitioners.dp.down_set_listing import DownSetTable
from pipecompile.partitioners.objective import TOLERANCE

__all__ = ["NEVER", "StageCandidates", "find_candidates"]

Bits = NDArray[np.bool_]
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

MAX_CANDIDATES = 4_000_000
"""Candidate stages that are kept: 100 MB."""

NEVER = 1 << 30
"""Stages to a down-set that cannot be reached."""


@dataclass(frozen=True, slots=True)
class StageCandidates:
    """Stages `after - before`, indices of down-sets, ordered by `after`, then `before`. `load` is without relief.

    `has_source` and `n_inside` are [down-set, flow]: whether the source of a flow is inside, and how many of its consumers.
    """

    table: DownSetTable
    before: Ints
    after: Ints
    load: Floats
    has_source: Bits
    n_inside: NDArray[np.int16]


def find_candidates(
    clusters: Clusters, table: DownSetTable, n_stages: int, target: float, deadline: float = inf
) -> StageCandidates | None:
    """Return the stages within the target that a cut into `n_stages` stages can have; None if there are too many, or after the deadline.

    Requires tensors that flow forwards, links alike and without overlap.
    """
    search, pairs, found = _CandidateSearch(clusters, table, n_stages, target), [], 0
    for j in range(len(table) - 1):
        after, load = search.stages_from(j)
        pairs.append((np.full(len(after), j), after, load))
        found += len(after)
        if found > MAX_CANDIDATES or monotonic() > deadline:
            return None
    before, after, load = (np.concatenate(column) for column in zip(*pairs, strict=True))
    order = np.argsort(after, kind="stable")
    return StageCandidates(table, before[order], after[order], load[order], search.has_source, search.n_inside)


class _CandidateSearch:
    """The stages that begin at one down-set after the other. `words` are the clusters inside, 64 at a time. `is_open` tells whether a flow
    crosses the boundary after a down-set; `fewest` has the fewest stages to each down-set so far.
    """

    def __init__(self, clusters: Clusters, table: DownSetTable, n_stages: int, target: float) -> None:
        flows = clusters.flows
        self.table, self.n_stages, self.target = table, n_stages, target * (1 + TOLERANCE)
        self.words = _as_words(table.inside)
        self.time = np.array([flow.time for flow in flows])
        self.n_consumers = np.array([len(flow.consumers) for flow in flows], dtype=np.int16)
        self.has_source = table.inside[:, [flow.source for flow in flows]]
        self.n_inside = np.zeros((len(table), len(flows)), dtype=np.int16)
        for f, flow in enumerate(flows):
            self.n_inside[:, f] = table.inside[:, flow.consumers].sum(axis=1)
        self.is_open = self.has_source & (self.n_inside < self.n_consumers)
        self.last = np.searchsorted(table.work, table.work + self.target + table.relief[-1], side="right")
        self.needed = table.least_stages_after(target)
        self.fewest = np.full(len(table), NEVER, dtype=np.int64)
        self.fewest[0] = 0

    def stages_from(self, j: int) -> tuple[Ints, Floats]:
        """Return the down-sets that end a stage which begins at down-set j, and its loads."""
        after = self._larger(j) if self.fewest[j] < NEVER else np.arange(0)
        work = self.table.work[after] - self.table.work[j]
        relief = self.table.relief[after] - self.table.relief[j]
        is_light = work - relief + np.abs(self.table.leaving[after] - self.table.leaving[j]) <= self.target
        after, relief = after[is_light], relief[is_light]
        load = work[is_light] + self._tensors(j, after)
        within = load - relief <= self.target
        after, load = after[within], load[within]
        self.fewest[after] = np.minimum(self.fewest[after], self.fewest[j] + 1)
        return after, load

    def _larger(self, j: int) -> Ints:
        """Return the down-sets with j inside of which the stages, with a stage from j, can be enough."""
        begin, end = j + 1, self.last[j]
        is_larger = self.needed[begin:end] <= self.n_stages - self.fewest[j] - 1
        for words in self.words:
            is_larger &= words[begin:end] & words[j] == words[j]
        larger: Ints = np.flatnonzero(is_larger) + begin
        return larger

    def _tensors(self, j: int, after: Ints) -> Floats:
        """Return the seconds of tensors that stages from j receive, and send once each: what crosses the boundary after a stage, less
        what crossed both boundaries, and what a stage receives of that which crossed the one before.
        """
        flows = np.flatnonzero(self.is_open[j])
        n_inside = self.n_inside[np.ix_(after, flows)]
        changes = (n_inside > self.n_inside[j, flows]) * 1.0 - (n_inside < self.n_consumers[flows])
        seconds: Floats = self.table.leaving[after] + changes @ self.time[flows]
        return seconds


def _as_words(rows: Bits) -> NDArray[np.uint64]:
    """Pack the bits of rows into words: an array (words, rows)."""
    packed = np.zeros((len(rows), (rows.shape[1] + 63) // 64 * 8), dtype=np.uint8)
    packed[:, : (rows.shape[1] + 7) // 8] = np.packbits(rows, axis=1)
    words: NDArray[np.uint64] = np.ascontiguousarray(packed.view(np.uint64).T)
    return words
