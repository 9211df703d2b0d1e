"""The reduced graph: clusters without what multiplies the down-sets and hardly weighs in a cut.

clusters ─▶ without loose clusters ─▶ side branches joined ─▶ without what is read through        a bound is found here
    stage of all  ◀── fill up ◀── shed parts ◀── first reader ◀──  stage of those left            a cut goes back
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pipecompile.partitioners.clusters import Clusters
from pipecompile.partitioners.dp.loose_clusters import LooseClusters, set_aside
from pipecompile.partitioners.dp.read_through import ReadThrough, read_through
from pipecompile.partitioners.dp.shed_branches import shed_parts
from pipecompile.partitioners.dp.side_branches import JoinedBranches, join_side_branches
from pipecompile.partitioners.machine import Machine

__all__ = ["ReducedGraph", "reduced"]

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
        """Whether the best cut of what is left is the best of all."""
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
