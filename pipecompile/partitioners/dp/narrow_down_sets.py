"""The narrowest down-sets of a graph that has too many: those that few tensors leave, for cuts that are good but not proven.

    size      0    1    2    3  ...                 work   0 ──┬────┬────┬────┬── all
    beam     {} ─▶ ◦ ─▶ ◦ ─▶ ◦                      kept      ◦◦   ◦◦   ◦◦   ◦◦        of every slice of the work
                ╰▶ ◦ ─▶ ◦    ✗  more leaves it

Down-sets are listed by size; a level keeps those that the fewest seconds of tensors leave. A boundary between stages costs what leaves
it, so the best boundaries are among them.
"""

from __future__ import annotations

from collections.abc import Iterable
from heapq import nsmallest
from time import monotonic

import numpy as np

from pipecompile.partitioners.clusters import adjacency
from pipecompile.partitioners.dp.down_set_levels import DownSetLevels
from pipecompile.partitioners.dp.down_set_listing import DownSetListing
from pipecompile.partitioners.dp.side_branches import JoinedBranches

__all__ = ["list_narrow_down_sets"]

MAX_WIDTH = 1000
"""Down-sets of one size that are extended. NASNet's best cuts were found with 1,000; 40,000 took longer for the same cut."""

N_KEPT = 3000
"""Down-sets that are kept in all: the candidate stages between them grow with the square. A second or two."""

MOST_LABELS = 6
"""Labels that each down-set keeps: with all of them, one target of NASNet in 32 stages takes seconds."""

SLICES_PER_STAGE = 40
"""Slices of the work, per stage: the finest balance that is asked for."""

LEVELS_PER_CHECK = 16
"""Levels between two looks at the clock."""


def list_narrow_down_sets(
    branches: JoinedBranches, n_stages: int, speed: float, deadline: float
) -> DownSetListing | None:
    """Return about `N_KEPT` down-sets, with the least tensors that leave them for their work; None after the deadline."""
    clusters, found = branches.clusters, dict[int, tuple[float, float]]()
    levels = DownSetLevels(clusters.time, adjacency(clusters), flows=clusters.flows)
    for number in range(len(clusters) + 1):
        found |= {mask: (seconds / speed, leaving) for mask, (_, seconds, leaving) in levels.level.items()}
        levels.advance(len(clusters) * MAX_WIDTH)
        if len(levels.level) > MAX_WIDTH:
            levels.level = dict(nsmallest(MAX_WIDTH, levels.level.items(), key=lambda item: item[1][2]))
        if not number % LEVELS_PER_CHECK and monotonic() > deadline:
            return None
    n_slices = min(SLICES_PER_STAGE * n_stages, N_KEPT // 2)
    masks = sorted(_narrowest(found, n_slices), key=lambda mask: (found[mask][0], mask.bit_count()))
    work, leaving = np.array([found[mask] for mask in masks]).T
    return DownSetListing(branches, masks, work, leaving, MOST_LABELS)


def _narrowest(found: dict[int, tuple[float, float]], n_slices: int) -> Iterable[int]:
    """Return the down-sets that the least leaves in each slice of the work, with the empty and the whole one."""
    total = max(work for work, _ in found.values())
    slices: list[list[int]] = [[] for _ in range(n_slices + 1)]
    for mask, (work, _) in found.items():
        slices[int(work / total * n_slices) if total else 0].append(mask)
    ends = {0, max(found)}
    return ends.union(*(nsmallest(N_KEPT // n_slices, each, key=lambda mask: found[mask][1]) for each in slices))
