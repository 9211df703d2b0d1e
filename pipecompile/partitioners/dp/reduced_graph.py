"""The reduced graph: clusters without those that multiply the down-sets and hardly weigh in a cut.

clusters ─▶ without loose clusters ─▶ side branches joined ─▶ without what is read through        a bound is found here
    stage of all  ◀── fill up ◀── shed parts ◀── first reader ◀──  stage of those left            a cut goes back

`shed_parts` moves parts of side branches from stages above a target to earlier stages with time left:

stage    0         1          2              stage 2 is over the target: the part that brings it below
       [a .  ]   [b c ]     [d e table]      goes to the last stage before that stays below, here 0
          ╰────────────────────╯
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pipecompile.partitioners.clusters import Clusters
from pipecompile.partitioners.dp.loose_clusters import LooseClusters, set_aside
from pipecompile.partitioners.dp.read_through import ReadThrough, read_through
from pipecompile.partitioners.dp.side_branches import BranchPart, JoinedBranches, join_side_branches
from pipecompile.partitioners.machine import Machine
from pipecompile.partitioners.objective import TOLERANCE, LoadTracker

__all__ = ["ReducedGraph", "reduced", "shed_parts"]

LOOSE_SHARE = 0.05
"""Most work of a component that is set aside, as a share of the average stage: small ones fit into what the others leave."""

BRANCH_SHARE = 0.2
"""Most work of a side branch that is joined with its consumer or read through, likewise: a tower beside the main one is not."""


@dataclass(frozen=True, slots=True)
class ReducedGraph:
    """Clusters, and what is left of them in three steps. `loose_work` has the seconds that any stage can do."""

    clusters: Clusters
    machine: Machine
    loose: LooseClusters
    joined: JoinedBranches
    through: ReadThrough
    loose_work: float

    @property
    def branches(self) -> JoinedBranches:
        """The clusters that are left, with what their side branches can shed."""
        return self.through.branches

    @property
    def is_exact(self) -> bool:
        """Whether the best cut of the remaining clusters is the best of all."""
        return self.branches.is_exact and not self.loose.components and not self.through.readers

    def expand(self, assignment: Sequence[int], target: float) -> list[int]:
        """Return the stage of every cluster, from the stages of those that are left. Stages above the target shed parts of branches."""
        rest = self.loose.rest
        cut = rest.project(self.joined.clusters, self.through.place(assignment))
        cut = shed_parts(rest, self.machine, cut, self.joined.parts, target)
        return self.loose.place(self.clusters, self.machine, cut)


def reduced(clusters: Clusters, machine: Machine) -> ReducedGraph:
    """Return the reduced graph of clusters on stages of one speed. O(clusters^2) bytes."""
    speed = machine.speed[0]
    average = sum(clusters.time) / len(machine)
    loose = set_aside(clusters, LOOSE_SHARE * average)
    joined = join_side_branches(loose.rest, speed, BRANCH_SHARE * average / speed)
    through = read_through(joined, BRANCH_SHARE * average)
    return ReducedGraph(clusters, machine, loose, joined, through, (loose.work + through.work) / speed)


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
