"""Cuts into stages that are all alike, optimal where there are few down-sets: bisection over targets, one count of stages for each.

    lower bound ──┬──────────────────┬───────────────┬──────── incumbent
                  needs 33 stages    needs 33        needs 32: a cut

Three rounds, each from where the one before ended: each tensor is paid for once, without labels; labels that shed side branches, which
raise the bound, and whose paths become cuts where the parts fit elsewhere; and, where there is something to shed, labels that do not.
"""

from __future__ import annotations

from itertools import pairwise
from time import monotonic

import numpy as np

from pipecompile.partitioners.clusters import Clusters, transitive_closure
from pipecompile.partitioners.dp.fewest_stages import FewestStages
from pipecompile.partitioners.dp.loose_clusters import LooseClusters, set_aside
from pipecompile.partitioners.dp.shed_branches import shed_parts
from pipecompile.partitioners.dp.side_branches import JoinedBranches, join_side_branches
from pipecompile.partitioners.dp.stage_candidates import StageCandidates, find_candidates, list_down_sets
from pipecompile.partitioners.dp.stage_filling import MAX_CLUSTERS
from pipecompile.partitioners.incumbent import SolverState

__all__ = ["cut_alike_stages", "has_alike_stages"]

STEP = 0.5
"""Distance of two targets at which a round ends, and of its first target from the bound, in tolerances of the incumbent: the optimum
without labels is often that with them.
"""

LOOSE_SHARE = 0.05
"""Most work of a component that is set aside, as a share of the average stage: small ones fit into what the others leave."""

BRANCH_SHARE = 0.2
"""Most work of a side branch that is joined with its consumer, likewise: a tower beside the main one is not."""


def has_alike_stages(state: SolverState) -> bool:
    """Return whether stages differ in memory and recomputation alone, and no tensor can flow to a stage before its own. Both are left
    out: a bound without them is a bound, and a cut that does not fit is not taken.
    """
    clusters, machine = state.clusters, state.machine
    simple = machine.is_one_to_one and machine.links is None and not machine.overlap and len(set(machine.speed)) == 1
    simple = simple and not clusters.is_constrained and len(clusters) <= MAX_CLUSTERS
    return simple and _flows_are_ordered(clusters)


def _flows_are_ordered(clusters: Clusters) -> bool:
    """Return whether every consumer of a tensor comes after its source by precedence."""
    arcs = set(clusters.arcs)
    pairs = [(f.source, c) for f in clusters.flows for c in f.consumers if (f.source, c) not in arcs]
    closure = transitive_closure(clusters) if pairs else None
    return closure is None or all(closure[pair] for pair in pairs)


def cut_alike_stages(state: SolverState, tolerance: float, deadline: float, early_deadline: float) -> None:
    """Find the optimum and prove it where stages are alike and down-sets few: first to a tolerance, by the deadline, then to that of the
    state while it is early.
    """
    if state.assignment is None or not state.has_gap or len(state.machine) < 2 or not has_alike_stages(state):
        return
    state.enter("down-sets")
    average = sum(state.clusters.time) / len(state.machine)
    loose = set_aside(state.clusters, LOOSE_SHARE * average)
    branches = join_side_branches(loose.rest, state.machine.speed[0], BRANCH_SHARE * average / state.machine.speed[0])
    table = list_down_sets(branches, state.machine, state.target, deadline)
    if table is None:
        return
    candidates = find_candidates(branches.clusters, table, len(state.machine), state.target, deadline)
    if candidates is not None:
        search, before = _TargetBisection(state, loose, branches, candidates), state.tolerance
        state.tolerance = tolerance
        search.run(deadline)
        state.tolerance = before
        search.run(early_deadline)


class _TargetBisection:
    """The rounds over the candidates below the incumbent."""

    def __init__(
        self, state: SolverState, loose: LooseClusters, branches: JoinedBranches, candidates: StageCandidates
    ) -> None:
        self.state, self.loose, self.branches, self.table, self.deadline = state, loose, branches, candidates.table, 0.0
        machine = state.machine
        self.shedding, self.joined = (
            FewestStages(
                branches,
                candidates,
                len(machine),
                loose.work / machine.speed[0],
                sheds=sheds,
                multicast=machine.multicast,
            )
            for sheds in (True, False)
        )

    def run(self, deadline: float) -> None:
        """Run the rounds, to the tolerance of the state or the deadline."""
        self.deadline = deadline
        self._refute()
        self._settle(self.shedding, is_bound=True)
        if not self.branches.is_exact:
            self._settle(self.joined, is_bound=False)

    def _is_over(self) -> bool:
        return not self.state.has_gap or monotonic() > self.deadline

    def _refute(self) -> None:
        """Raise the bound to what is refuted without labels."""
        low, target = self.state.lower_bound, self.state.target
        high = 2 * target - low  # the first target is that of the incumbent
        while high - low > STEP * self.state.tolerance * self.state.bottleneck and not self._is_over():
            if self.shedding.is_refuted(target):
                low = target
                self.state.raise_bound(low, "dp")
            else:
                high = target
            target = (low + high) / 2

    def _settle(self, count: FewestStages, *, is_bound: bool) -> None:
        """Search the least target with a path, offer cuts along paths, and raise the bound if a target without a path has no cut."""
        low, high, step = self.state.lower_bound, self.state.target, STEP * self.state.tolerance
        target = low + step * self.state.bottleneck
        while high - low > step * self.state.bottleneck and not self._is_over():
            boundaries = count.path(target, self.deadline)
            if boundaries is not None:
                self._offer(boundaries, target)
                high = min(target, self.state.bottleneck)
            elif count.is_complete:
                low = target
                if is_bound:
                    self.state.raise_bound(low, "dp")
            else:
                break
            target = (low + high) / 2

    def _offer(self, boundaries: list[int], target: float) -> None:
        """Offer the cut of a path, in which stages above the target shed parts of side branches."""
        machine, rest = self.state.machine, self.loose.rest
        cut = rest.project(self.branches.clusters, self._assignment(boundaries))
        cut = shed_parts(rest, machine, cut, self.branches.parts, target)
        self.state.offer(self.loose.place(self.state.clusters, machine, cut), method="dp")

    def _assignment(self, boundaries: list[int]) -> list[int]:
        """Return the stage of every cluster of a path."""
        stage_of = np.zeros(self.table.inside.shape[1], dtype=np.int64)
        for s, (before, after) in enumerate(pairwise(boundaries)):
            stage_of[self.table.inside[after] & ~self.table.inside[before]] = s
        return [int(s) for s in stage_of]
