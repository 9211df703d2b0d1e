"""Local search: descend from a cut by moves of clusters between stages, within precedence, constraints and memory.

    stage    0        1        2
           [a b] c ─▶ [d e]    [f]        c may go to 1 if all its consumers are in 1 or later; b and c may go together

A move takes one cluster to any stage, or one cluster with all that must go along to the next or the previous stage. Only
clusters of the devices with the largest load are moved. Cuts are compared lexicographically: bottleneck, number of devices at
the bottleneck, sum of loads. A move costs O(flows of the moved clusters). The descent ends at a local minimum or the deadline.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from time import monotonic

from pipecompile.partitioners.clusters import Clusters, adjacency
from pipecompile.partitioners.constraints import StageRanges
from pipecompile.partitioners.machine import Machine
from pipecompile.partitioners.objective import LoadTracker

__all__ = ["descend"]

Score = tuple[float, int, float]
"""(bottleneck, devices at the bottleneck, sum of loads), compared lexicographically; less is better."""

MAX_TOGETHER = 40
"""The largest number of clusters that move together."""


def descend(
    clusters: Clusters, machine: Machine, assignment: Sequence[int], ranges: StageRanges | None, deadline: float
) -> list[int]:
    """Return a cut that no move improves, at worst the initial one."""
    descent = _Descent(clusters, machine, assignment, ranges)
    improved = True
    while improved:
        improved = False
        for cluster, target in list(descent.moves()):
            if monotonic() > deadline:
                return descent.tracker.assignment
            improved = descent.attempt(cluster, target) or improved
    return descent.tracker.assignment


class _Descent:
    def __init__(
        self, clusters: Clusters, machine: Machine, assignment: Sequence[int], ranges: StageRanges | None
    ) -> None:
        n = len(clusters)
        self.tracker, self.machine = LoadTracker(clusters, machine, assignment), machine
        self.strict_arcs = clusters.strict_arcs
        self.predecessors, self.successors = adjacency(clusters)
        self.earliest, self.latest = ranges or ([0] * n, [len(machine) - 1] * n)
        self.score = self._score()

    def moves(self) -> Iterator[tuple[int, int]]:
        """Yield (cluster, stage) for the clusters of the most loaded devices: the stages that each can reach alone, and
        the next and previous stage.
        """
        loads = [self.tracker.load(d) for d in range(len(self.machine.speed))]
        critical = {d for d, load in enumerate(loads) if load >= max(loads) * (1 - 1e-12)}
        for cluster, s in enumerate(self.tracker.assignment):
            if self.machine.device_of[s] in critical:
                low, high = self._range_alone(cluster)
                low, high = min(low, max(s - 1, self.earliest[cluster])), max(high, min(s + 1, self.latest[cluster]))
                yield from ((cluster, target) for target in range(low, high + 1) if target != s)

    def attempt(self, cluster: int, target: int) -> bool:
        """Move a cluster, and all that must go along, to stage `target`; undo it and return False if that is no better."""
        origin = self.tracker.assignment[cluster]
        moved = self._closure(cluster, target) if origin != target else []
        if not moved:
            return False
        origins = [(v, self.tracker.assignment[v]) for v in moved]
        for v in moved:
            self.tracker.move(v, target)
        if (score := self._score()) < self.score:
            self.score = score
            return True
        for v, s in origins:
            self.tracker.move(v, s)
        return False

    def _closure(self, cluster: int, target: int) -> list[int]:
        """Return the cluster and all that precedence forces along; empty if these are too many or may not move there."""
        assignment, moved, pending = self.tracker.assignment, {cluster}, [cluster]
        onwards = target > assignment[cluster]
        while pending:
            v = pending.pop()
            if not self.earliest[v] <= target <= self.latest[v]:
                return []
            for other in self.successors[v] if onwards else self.predecessors[v]:
                pair = (v, other) if onwards else (other, v)
                if other in moved:
                    if pair in self.strict_arcs:
                        return []
                    continue
                gap = pair in self.strict_arcs
                violated = assignment[other] < target + gap if onwards else assignment[other] > target - gap
                if violated and (gap or len(moved) == MAX_TOGETHER):
                    return []
                if violated:
                    moved.add(other)
                    pending.append(other)
        return sorted(moved)

    def _range_alone(self, cluster: int) -> tuple[int, int]:
        """Return the first and the last stage that a cluster can move to alone."""
        stage_of = self.tracker.assignment
        low = max((stage_of[a] + ((a, cluster) in self.strict_arcs) for a in self.predecessors[cluster]), default=0)
        high = min(
            (stage_of[b] - ((cluster, b) in self.strict_arcs) for b in self.successors[cluster]),
            default=len(self.machine) - 1,
        )
        return max(low, self.earliest[cluster]), min(high, self.latest[cluster])

    def _score(self) -> Score:
        loads = [self.tracker.load(d) for d in range(len(self.machine.speed))]
        worst = max(loads)
        return worst, sum(load >= worst * (1 - 1e-12) for load in loads), sum(loads)
