"""Candidate stages: pairs of down-sets whose difference is a stage within a target, for stages that are all alike.

    {} ─▶ {a} ─▶ {a b} ─▶ ...       a stage is what lies between two down-sets, one inside the other:
     ╰─────▶──────╯                 {} to {a b} is the stage {a b}

Where stages are alike it does not matter which number a stage has: each pair is looked at once, and not once for each number, as in
`down_sets.py`. Networks of blocks in a row have few down-sets: ResNet-152 355, a transformer of 48 layers 1881.

The load of a candidate counts each tensor that leaves it once. What a sender pays more for several receivers is left to `fewest_stages.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, inf
from time import monotonic

import numpy as np
from numpy.typing import NDArray

from pipecompile.partitioners.clusters import Clusters, adjacency
from pipecompile.partitioners.dp.down_set_levels import DownSetLevels, as_rows
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
        return np.array([_least_stages(seconds, target) for seconds in after.tolist()], dtype=np.int64)


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
    speed, relief = machine.speed[0], float(branches.relief.sum())
    clusters, total = branches.clusters, sum(branches.clusters.time)
    levels, kept, passed = DownSetLevels(clusters.time, adjacency(clusters)), dict[int, float](), 0
    while levels.level:
        for mask, (_, work) in levels.level.items():
            before, after = (
                _least_stages(amount, target) for amount in (work / speed, (total - work) / speed - relief)
            )
            if before + after <= len(machine):
                kept[mask] = work / speed
        passed += len(levels.level)
        levels.advance(MAX_WIDTH)
        is_wide = len(levels.level) > MAX_WIDTH or passed > MAX_PASSED
        if is_wide or len(kept) > MAX_DOWN_SETS or monotonic() > deadline:
            return None
    masks = sorted(kept, key=lambda mask: (kept[mask], mask.bit_count()))
    inside = as_rows(masks, len(clusters)).astype(bool)
    return DownSetTable(inside, np.array([kept[mask] for mask in masks]), inside @ branches.relief)


def _least_stages(seconds: float, target: float) -> int:
    """Return how many stages within the target so much work needs."""
    return ceil(max(seconds, 0.0) / target - TOLERANCE)


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
