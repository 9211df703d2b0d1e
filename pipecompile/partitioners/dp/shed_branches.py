"""Shed parts of side branches from the stages of a cut that exceed a target, to stages before them with time left.

stage    0         1          2              stage 2 is over the target: the part that brings it below
       [a .  ]   [b c ]     [d e table]      goes to the last stage before that stays below, here 0
          ╰────────────────────╯
"""

from __future__ import annotations

from collections.abc import Sequence

from pipecompile.partitioners.clusters import Clusters
from pipecompile.partitioners.dp.side_branches import BranchPart
from pipecompile.partitioners.machine import Machine
from pipecompile.partitioners.objective import TOLERANCE, LoadTracker

__all__ = ["shed_parts"]


def shed_parts(
    clusters: Clusters, machine: Machine, assignment: Sequence[int], parts: Sequence[BranchPart], target: float
) -> list[int]:
    """Return the cut after parts have left the stages above the target, from the last to the first. Requires a device per stage."""
    tracker, limit = LoadTracker(clusters, machine, assignment), target * (1 + TOLERANCE)
    for s in reversed(range(len(machine))):
        left = [part for part in parts if assignment[part.consumer] == s and part.gain > 0]
        while left and tracker.load(s) > limit:
            part = _smallest_enough(left, tracker.load(s) - limit)
            left.remove(part)
            if _move(tracker, part, s, limit):
                left = [other for other in left if not set(other.members) & set(part.members)]
    return tracker.assignment


def _smallest_enough(parts: Sequence[BranchPart], seconds: float) -> BranchPart:
    """Return the part of least gain among those that gain at least `seconds`; the one of most gain if none does."""
    enough = [part for part in parts if part.gain >= seconds]
    return min(enough, key=lambda part: part.gain) if enough else max(parts, key=lambda part: part.gain)


def _move(tracker: LoadTracker, part: BranchPart, origin: int, limit: float) -> bool:
    """Move a part to the last stage before its own that stays below the limit, not before what it comes after. Return whether there
    is one.
    """
    first = max((tracker.assignment[source] for source in part.after), default=0)
    for s in reversed(range(first, origin)):
        for cluster in part.members:
            tracker.move(cluster, s)
        if tracker.load(s) <= limit:
            return True
    for cluster in part.members:
        tracker.move(cluster, origin)
    return False
