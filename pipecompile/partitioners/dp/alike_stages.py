"""Cuts into stages that are all alike, optimal where there are few down-sets: bisection over targets, one count of stages for each.

    lower bound ──┬──────────────────┬───────────────┬──────── incumbent
                  needs 33 stages    needs 33        needs 32: a cut

Three rounds, each from where the one before ended: each tensor is paid for once, without labels; labels that shed side branches, which
raise the bound, and whose paths become cuts where the parts fit elsewhere; and, where there is something to shed, labels that do not.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from math import inf
from time import monotonic

import numpy as np

from pipecompile.partitioners.clusters import Clusters, transitive_closure
from pipecompile.partitioners.dp.down_set_listing import DownSetListing, list_down_sets
from pipecompile.partitioners.dp.fewest_stages import FewestStages
from pipecompile.partitioners.dp.reduced_graph import ReducedGraph, reduced
from pipecompile.partitioners.dp.stage_candidates import StageCandidates, find_candidates
from pipecompile.partitioners.dp.stage_filling import MAX_CLUSTERS
from pipecompile.partitioners.incumbent import SolverState

__all__ = ["TargetBisection", "cut_alike_stages", "has_alike_stages"]

STEP = 0.5
"""Distance of two targets at which a round ends, and of its first target from the bound, in tolerances of the incumbent: the optimum
without labels is often that with them.
"""

REACHES = 0.003, 0.01, 0.02, 0.03, 0.04, 0.05, 0.06, 0.07, 0.085, 0.1, 0.15, 0.2, inf
"""Limits of targets above the lower bound, as its shares, one after the other: below a low limit few down-sets can be boundaries."""


_Relaxed = tuple[float, float]
"""A bound and an incumbent."""


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
    graph = reduced(state.clusters, state.machine)
    listing = list_down_sets(graph.branches, state.machine, state.target, deadline)
    if listing is None:
        return
    before, bound, known = state.tolerance, state.lower_bound, None
    for reach in REACHES:
        limit = min(bound * (1 + reach), state.target) if bound else state.target
        if limit < state.lower_bound:
            continue
        search = TargetBisection.of(state, graph, listing, limit, deadline)
        if search is None:
            break
        state.tolerance = tolerance
        known = search.run(deadline, known)
        state.tolerance = before
        if not state.has_gap or state.bottleneck <= limit or limit >= state.target:
            search.run(early_deadline)
            break


class TargetBisection:
    """The rounds over the candidates below a limit."""

    def __init__(
        self, state: SolverState, graph: ReducedGraph, candidates: StageCandidates, limit: float, most_labels: int | None
    ) -> None:  # fmt: skip
        self.state, self.graph, self.table, self.limit = state, graph, candidates.table, limit
        self.deadline = 0.0
        count = partial(
            FewestStages, graph.branches, candidates, len(state.machine), graph.loose_work,
            multicast=state.machine.multicast, most_labels=most_labels,
        )  # fmt: skip
        self.shedding, self.joined = count(sheds=True), count(sheds=False)

    @classmethod
    def of(
        cls, state: SolverState, graph: ReducedGraph, listing: DownSetListing, limit: float, deadline: float
    ) -> TargetBisection | None:
        """Return the rounds; None if there are too many down-sets or candidates, or after the deadline."""
        table = listing.table(len(state.machine), limit)
        if table is None:
            return None
        candidates = find_candidates(graph.branches.clusters, table, len(state.machine), limit, deadline)
        return None if candidates is None else cls(state, graph, candidates, limit, listing.most_labels)

    @property
    def high(self) -> float:
        """The highest target."""
        return min(self.limit, self.state.target)

    def run(self, deadline: float, known: _Relaxed | None = None) -> _Relaxed | None:
        """Run the rounds, to the tolerance of the state or the deadline. Return the targets between which labels that shed found a path at
        once, which are `known` then: they find no other between the same ones.
        """
        self.deadline = deadline
        self._refute()
        between = self.state.lower_bound, self.state.bottleneck
        if between != known or self.graph.branches.is_exact:
            is_open = self._settle(self.shedding, is_bound=True)
            known = between if is_open and between == (self.state.lower_bound, self.state.bottleneck) else None
        if not self.graph.branches.is_exact:
            self._settle(self.joined, is_bound=False)
        return known

    def _is_over(self) -> bool:
        return not self.state.has_gap or monotonic() > self.deadline

    def _refute(self) -> None:
        """Raise the bound to the highest target that is refuted without labels. Above the highest target there are candidates that are not known."""
        low, high = self.state.lower_bound, self.high
        if self.shedding.is_refuted(high):
            self.state.raise_bound(high, "dp")
            return
        while high - low > STEP * self.state.tolerance * self.state.bottleneck and not self._is_over():
            target = (low + high) / 2
            if self.shedding.is_refuted(target):
                low = target
                self.state.raise_bound(low, "dp")
            else:
                high = target

    def _settle(self, count: FewestStages, *, is_bound: bool) -> bool:
        """Search the least target with a path, offer cuts along paths, and raise the bound if a target without a path has no cut. Return
        whether the last target had a path.
        """
        low, high, step = self.state.lower_bound, self.high, STEP * self.state.tolerance
        target, boundaries = low + step * self.state.bottleneck, None
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
        return boundaries is not None

    def _offer(self, boundaries: list[int], target: float) -> None:
        """Offer the cut of a path."""
        self.state.offer(self.graph.expand(self._assignment(boundaries), target), method="dp")

    def _assignment(self, boundaries: list[int]) -> list[int]:
        """Return the stage of every cluster of a path."""
        stage_of = np.zeros(self.table.inside.shape[1], dtype=np.int64)
        for s, (before, after) in enumerate(pairwise(boundaries)):
            stage_of[self.table.inside[after] & ~self.table.inside[before]] = s
        return [int(s) for s in stage_of]
