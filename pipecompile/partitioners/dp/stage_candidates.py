"""Candidate stages: pairs of down-sets whose difference is a stage within a target, for stages that are all alike.

      ┌─▶ b ─┐            {} ─▶ {a} ─▶ {a b} ─▶ ...       a stage is what lies between two down-sets, one inside the other:
    a ┤      ├─▶ d          ╰────▶───────╯                {} to {a b} is the stage {a b}
      └─▶ c ─┘

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

from pipecompile.partitioners.clusters import Clusters, adjacency
from pipecompile.partitioners.dp.side_branches import JoinedBranches
from pipecompile.partitioners.machine import Machine
from pipecompile.partitioners.objective import TOLERANCE

__all__ = ["NEVER", "DownSetTable", "StageCandidates", "find_candidates", "list_down_sets"]

Bits = NDArray[np.bool_]
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

MAX_PASSED = 200_000
"""Down-sets that are passed in a listing: a second."""

MAX_WIDTH = 8_000
"""Down-sets of one size: a graph with more has too many in all, which is told in a tenth of a second."""

MAX_DOWN_SETS = 20_000
"""Down-sets that may be boundaries."""

MAX_CANDIDATES = 4_000_000
"""Candidate stages that are kept: 100 MB."""

NEVER = 1 << 30
"""Stages to a down-set that cannot be reached."""


@dataclass(frozen=True, slots=True)
class DownSetTable:
    """The down-sets that can be boundaries, by work and size, so that each comes after all that are inside it.

    `inside` is [down-set, cluster]. `work` has the seconds of each at the speed of a stage, `relief` those of them that the stages
    of its clusters can gain by shedding side branches.
    """

    inside: Bits
    work: Floats
    relief: Floats

    def __len__(self) -> int:
        return len(self.work)

    def least_stages_after(self, target: float) -> Ints:
        """Return, per down-set, the number of stages without which the work after it is not done."""
        after = self.work[-1] - self.work - (self.relief[-1] - self.relief)
        least: Ints = np.ceil(np.maximum(after, 0.0) / target - TOLERANCE).astype(np.int64)
        return least


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


def list_down_sets(
    branches: JoinedBranches, machine: Machine, target: float, deadline: float = inf
) -> DownSetTable | None:
    """Return the down-sets that can be boundaries of a cut within the target; None if there are too many, or after the deadline."""
    clusters, speed = branches.clusters, machine.speed[0]
    total, relief = sum(clusters.time) / speed, float(branches.relief.sum())
    levels, kept, passed = _Levels(clusters, speed), dict[int, float](), 0
    while levels.level:
        for mask, (_, work) in levels.level.items():
            needed = (np.ceil(max(amount, 0.0) / target - TOLERANCE) for amount in (work, total - work - relief))
            if sum(needed) <= len(machine):
                kept[mask] = work
        levels.advance()
        passed += len(levels.level)
        is_wide = len(levels.level) > MAX_WIDTH or passed > MAX_PASSED
        if is_wide or len(kept) > MAX_DOWN_SETS or monotonic() > deadline:
            return None
    return _table(kept, branches)


class _Levels:
    """Down-sets by size. A level has the clusters that are ready and the work of each, as a bit mask."""

    def __init__(self, clusters: Clusters, speed: float) -> None:
        predecessors, successors = adjacency(clusters)
        self.needs = [sum(1 << a for a in set(sources)) for sources in predecessors]
        self.successors = [sorted(set(readers)) for readers in successors]
        self.time = [time / speed for time in clusters.time]
        ready = tuple(v for v, need in enumerate(self.needs) if not need)
        self.level: dict[int, tuple[tuple[int, ...], float]] = {0: (ready, 0.0)}

    def advance(self) -> None:
        """Add each ready cluster to each down-set."""
        following: dict[int, tuple[tuple[int, ...], float]] = {}
        for mask, (ready, work) in self.level.items():
            for v in ready:
                larger = mask | 1 << v
                if larger not in following:
                    freed = tuple(b for b in self.successors[v] if not self.needs[b] & ~larger)
                    following[larger] = (tuple(b for b in ready if b != v) + freed, work + self.time[v])
            if len(following) > MAX_WIDTH:
                break
        self.level = following


def _table(work_of: dict[int, float], branches: JoinedBranches) -> DownSetTable:
    n = len(branches.clusters)
    masks = sorted(work_of, key=lambda mask: (work_of[mask], mask.bit_count()))
    width = (n + 7) // 8
    packed = np.frombuffer(b"".join(mask.to_bytes(width, "little") for mask in masks), dtype=np.uint8)
    inside = np.unpackbits(packed.reshape(len(masks), width), axis=1, count=n, bitorder="little").astype(bool)
    return DownSetTable(inside, np.array([work_of[mask] for mask in masks]), inside @ branches.relief)


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
    """The stages that begin at one down-set after the other. `is_open` tells whether a flow crosses the boundary after a down-set, and
    `crossing` has the seconds of those that do; `fewest` has the fewest stages to each down-set so far.
    """

    def __init__(self, clusters: Clusters, table: DownSetTable, n_stages: int, target: float) -> None:
        flows = clusters.flows
        self.table, self.n_stages, self.target = table, n_stages, target * (1 + TOLERANCE)
        self.packed = np.packbits(table.inside, axis=1)
        self.time = np.array([flow.time for flow in flows])
        self.n_consumers = np.array([len(flow.consumers) for flow in flows], dtype=np.int16)
        self.has_source = table.inside[:, [flow.source for flow in flows]]
        self.n_inside = np.zeros((len(table), len(flows)), dtype=np.int16)
        for f, flow in enumerate(flows):
            self.n_inside[:, f] = table.inside[:, flow.consumers].sum(axis=1)
        self.is_open = self.has_source & (self.n_inside < self.n_consumers)
        self.crossing = self.is_open @ self.time
        self.last = np.searchsorted(table.work, table.work + self.target + table.relief[-1], side="right")
        self.needed = table.least_stages_after(target)
        self.fewest = np.full(len(table), NEVER, dtype=np.int64)
        self.fewest[0] = 0

    def stages_from(self, j: int) -> tuple[Ints, Floats]:
        """Return the down-sets that end a stage which begins at down-set j, and its loads."""
        window = np.arange(j + 1, self.last[j] if self.fewest[j] < NEVER else j + 1)
        window = window[self.fewest[j] + 1 + self.needed[window] <= self.n_stages]
        after = window[~(self.packed[j] & ~self.packed[window]).any(axis=1)]
        load = self.table.work[after] - self.table.work[j] + self._tensors(j, after)
        within = load - (self.table.relief[after] - self.table.relief[j]) <= self.target
        after, load = after[within], load[within]
        self.fewest[after] = np.minimum(self.fewest[after], self.fewest[j] + 1)
        return after, load

    def _tensors(self, j: int, after: Ints) -> Floats:
        """Return the seconds of tensors that stages from j receive, and send once each: what crosses the boundary after a stage, less
        what crossed both boundaries, and what a stage receives of that which crossed the one before.
        """
        flows = np.flatnonzero(self.is_open[j])
        n_inside = self.n_inside[np.ix_(after, flows)]
        changes = (n_inside > self.n_inside[j, flows]) * 1.0 - (n_inside < self.n_consumers[flows])
        seconds: Floats = self.crossing[after] + changes @ self.time[flows]
        return seconds
