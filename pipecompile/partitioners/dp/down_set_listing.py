"""The down-sets that can be boundaries between stages that are all alike: a listing for a high target, and tables for lower ones.

listing ──┬─▶ table at target 1.01 ─▶ candidates ...
          ├─▶ table at target 1.02        what a boundary is worth is known at once: the stages before do the work inside and
          ╰─▶ ...                         send what leaves, the stages after receive it and do the rest
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from time import monotonic

import numpy as np
from numpy.typing import NDArray

from pipecompile.partitioners.clusters import adjacency
from pipecompile.partitioners.dp.down_set_levels import DownSetLevels, as_rows
from pipecompile.partitioners.dp.side_branches import JoinedBranches
from pipecompile.partitioners.machine import Machine
from pipecompile.partitioners.objective import TOLERANCE

__all__ = ["DownSetListing", "DownSetTable", "list_down_sets"]

Bits = NDArray[np.bool_]
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

MAX_PASSED = 1_000_000
"""Down-sets that are passed in a listing: some seconds."""

MAX_WIDTH = 8_000
"""Down-sets of one size: a graph with more has too many in all, which is told in a tenth of a second."""

MAX_DOWN_SETS = 80_000
"""Down-sets of a table."""


@dataclass(frozen=True, slots=True)
class DownSetTable:
    """The down-sets that can be boundaries, by work and size, so that each comes after all that are inside it.

    `inside` is [down-set, cluster]. `work` has the seconds of each at the speed of a stage, `relief` those of them that the stages
    of its clusters can gain by shedding side branches, and `leaving` the seconds of tensors that leave it, each of which the stages
    before send and the stages after receive at least once.
    """

    inside: Bits
    work: Floats
    relief: Floats
    leaving: Floats

    def __len__(self) -> int:
        return len(self.work)

    def least_stages_after(self, target: float) -> Ints:
        """Return, per down-set, the number of stages without which the work after it is not done."""
        after = self.work[-1] - self.work - (self.relief[-1] - self.relief) + self.leaving
        return _least_stages(after, target)


@dataclass(frozen=True, slots=True)
class DownSetListing:
    """Down-sets that can be boundaries of a cut within some target, as bit masks by work and size, with work and what leaves: all, unless
    `most_labels` says how many labels each keeps. Then bounds are of cuts along these down-sets and labels alone.
    """

    branches: JoinedBranches
    masks: list[int]
    work: Floats
    leaving: Floats
    most_labels: int | None = None

    def table(self, n_stages: int, target: float) -> DownSetTable | None:
        """Return the down-sets that can be boundaries within a target that is no higher; None if there are too many."""
        total, relief = self.work[-1], float(self.branches.relief.sum())
        before = _least_stages(self.work + self.leaving, target)
        kept = np.flatnonzero(before + _least_stages(total - self.work - relief + self.leaving, target) <= n_stages)
        if len(kept) > MAX_DOWN_SETS:
            return None
        inside = as_rows([self.masks[k] for k in kept], len(self.branches.clusters)).astype(bool)
        return DownSetTable(inside, self.work[kept], inside @ self.branches.relief, self.leaving[kept])


def list_down_sets(
    branches: JoinedBranches, machine: Machine, target: float, deadline: float = inf
) -> DownSetListing | None:
    """Return the down-sets that can be boundaries of a cut within the target; None if there are too many, or after the deadline."""
    clusters, speed, relief = branches.clusters, machine.speed[0], float(branches.relief.sum())
    total, most = sum(clusters.time) / speed, len(machine) * target * (1 + TOLERANCE)
    levels = DownSetLevels(clusters.time, adjacency(clusters), flows=clusters.flows)
    kept, passed = dict[int, tuple[float, float]](), 0
    while levels.level:
        for mask, (_, seconds, leaving) in levels.level.items():
            if total - relief + 2 * leaving <= most:
                kept[mask] = seconds / speed, leaving
        passed += len(levels.level)
        levels.advance(MAX_WIDTH)
        if len(levels.level) > MAX_WIDTH or passed > MAX_PASSED or monotonic() > deadline:
            return None
    masks = sorted(kept, key=lambda mask: (kept[mask][0], mask.bit_count()))
    work, leaving = np.array([kept[mask] for mask in masks]).T
    return DownSetListing(branches, masks, work, leaving)


def _least_stages(seconds: Floats, target: float) -> Ints:
    """Return how many stages within the target the work of `seconds` needs."""
    least: Ints = np.ceil(np.maximum(seconds, 0.0) / target - TOLERANCE).astype(np.int64)
    return least
