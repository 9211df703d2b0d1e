"""All cuts of a small graph in which no device has much more work than the others, for an objective that has many local minima.

    work of a device <= cap * total / devices       cap = 1.02, 1.05, ... until there are as many cuts as asked for

Clusters are assigned in topological order. A partial cut is dropped if a device exceeds its cap, or if what is not assigned yet does
not fit below the caps. The best cuts of series-parallel models of nine layers are up to 5 % shorter than those that moves find.
"""

from __future__ import annotations

from collections.abc import Sequence

from pipecompile.partitioners.clusters import adjacency
from pipecompile.partitioners.constraints import StageRanges
from pipecompile.partitioners.step_objective import StepObjective

__all__ = ["MAX_CLUSTERS", "balanced_cuts"]

MAX_CLUSTERS = 32
"""Clusters up to which cuts are listed."""

CAPS = (1.02, 1.05, 1.1, 1.15, 1.2, 1.3, 1.4)
"""Most work of a device, as a multiple of an even share, one cap after the other."""

VISITS = 8
"""Partial cuts that are visited for every cut asked for."""


def balanced_cuts(objective: StepObjective, ranges: StageRanges | None, most: int) -> list[list[int]]:
    """Return up to about `most` cuts that use all stages, the same at every call; none if the graph is large."""
    cuts: list[list[int]] = []
    if len(objective.clusters) > MAX_CLUSTERS:
        return cuts
    for cap in CAPS:
        listing = _Listing(objective, ranges, cap, most)
        listing.extend([])
        if len(listing.cuts) > len(cuts):
            cuts = listing.cuts
        if listing.visits_left <= 0 or len(listing.cuts) >= most:
            break
    return cuts


class _Listing:
    """The cuts below one cap, depth first."""

    def __init__(self, objective: StepObjective, ranges: StageRanges | None, cap: float, most: int) -> None:
        self.clusters, self.device_of, self.n_stages = objective.clusters, objective.placement, len(objective.placement)
        self.predecessors, _ = adjacency(objective.clusters)
        n, machine = len(objective.clusters), objective.machine
        self.earliest, self.latest = ranges or ([0] * n, [self.n_stages - 1] * n)
        speeds = [machine.speed[device] for device in range(max(self.device_of) + 1)]
        share = cap * sum(self.clusters.time) / sum(speeds)
        self.room = [share * speed * (1 + 1e-9) for speed in speeds]
        self.cuts: list[list[int]] = []
        self.n_used = min(self.n_stages, n)
        self.most, self.visits_left = most, most * VISITS
        self.rest = [sum(self.clusters.time[v:]) for v in range(n + 1)]

    def extend(self, cut: list[int]) -> None:
        """Add all cuts that begin with the stages of `cut`, in topological order of the clusters."""
        v = len(cut)
        if v == len(self.clusters):
            if len(set(cut)) == self.n_used:
                self.cuts.append(list(cut))
            return
        if self.rest[v] > sum(self.room) or self.n_used - len(set(cut)) > len(self.clusters) - v:
            return
        time, first = self.clusters.time[v], self._first_stage(v, cut)
        for stage in range(first, self.latest[v] + 1):
            self.visits_left -= 1
            if self.visits_left < 0 or len(self.cuts) >= self.most:
                return
            device = self.device_of[stage]
            if time <= self.room[device]:
                self.room[device] -= time
                self.extend([*cut, stage])
                self.room[device] += time

    def _first_stage(self, v: int, cut: Sequence[int]) -> int:
        strict = self.clusters.strict_arcs
        return max([self.earliest[v], *(cut[a] + ((a, v) in strict) for a in self.predecessors[v])])
