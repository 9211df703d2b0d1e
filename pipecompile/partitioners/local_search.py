"""Descent from a cut: move clusters between stages, as far as precedence, steering and memory let them.

    stage    0        1        2
           [a b] c ─▶ [d e]    [f]        c may go to 1 when all that reads it is in 1 or later; b and c may go together

A move is one cluster into any stage, or one with all that must go along into the next or the previous. Only clusters of the
fullest devices are tried. Better is: a smaller bottleneck, then fewer devices at it, then a smaller sum of loads. A move costs
O(flows of what moves); the deadline ends it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from time import monotonic

from pipecompile.partitioners.bounds.reachability import neighbours
from pipecompile.partitioners.clusters import Clusters
from pipecompile.partitioners.constraints import Span
from pipecompile.partitioners.machine import Stages
from pipecompile.partitioners.objective import Ledger

__all__ = ["refine"]

Score = tuple[float, int, float]

TOGETHER = 40
"""How many clusters move together at most."""


def refine(clusters: Clusters, stages: Stages, stage: Sequence[int], span: Span | None, deadline: float) -> list[int]:
    """A cut in which no move helps, at worst the given one."""
    descent = _Descent(clusters, stages, stage, span)
    moved = True
    while moved:
        moved = False
        for cluster, target in list(descent.moves()):
            if monotonic() > deadline:
                return descent.ledger.stage
            moved = descent.attempt(cluster, target) or moved
    return descent.ledger.stage


class _Descent:
    def __init__(self, clusters: Clusters, stages: Stages, stage: Sequence[int], span: Span | None) -> None:
        n = len(clusters)
        self.ledger, self.stages, self.strict = Ledger(clusters, stages, stage), stages, clusters.strict
        self.before, self.after = neighbours(clusters)
        self.first, self.last = span or ([0] * n, [len(stages) - 1] * n)
        self.score = self._score()

    def moves(self) -> Iterator[tuple[int, int]]:
        """(cluster, stage) for every cluster of the fullest devices: where it can go alone, and one stage on or back."""
        loads = [self.ledger.load(d) for d in range(len(self.stages.speed))]
        full = {d for d, load in enumerate(loads) if load >= max(loads) * (1 - 1e-12)}
        for cluster, s in enumerate(self.ledger.stage):
            if self.stages.device[s] in full:
                low, high = self._room(cluster)
                low, high = min(low, max(s - 1, self.first[cluster])), max(high, min(s + 1, self.last[cluster]))
                yield from ((cluster, target) for target in range(low, high + 1) if target != s)

    def attempt(self, cluster: int, target: int) -> bool:
        """Move a cluster, and what must go along, if that is better."""
        origin = self.ledger.stage[cluster]
        going = self._along(cluster, target) if origin != target else []
        if not going:
            return False
        back = [(v, self.ledger.stage[v]) for v in going]
        for v in going:
            self.ledger.move(v, target)
        if (score := self._score()) < self.score:
            self.score = score
            return True
        for v, s in back:
            self.ledger.move(v, s)
        return False

    def _along(self, cluster: int, target: int) -> list[int]:
        """The cluster and all that would be on the wrong side of it; empty when that is too much, or not allowed."""
        stage, going, rest = self.ledger.stage, {cluster}, [cluster]
        onwards = target > stage[cluster]
        while rest:
            v = rest.pop()
            if not self.first[v] <= target <= self.last[v]:
                return []
            for other in self.after[v] if onwards else self.before[v]:
                pair = (v, other) if onwards else (other, v)
                if other in going:
                    if pair in self.strict:
                        return []
                    continue
                gap = pair in self.strict
                wrong = stage[other] < target + gap if onwards else stage[other] > target - gap
                if wrong and (gap or len(going) == TOGETHER):
                    return []
                if wrong:
                    going.add(other)
                    rest.append(other)
        return sorted(going)

    def _room(self, cluster: int) -> tuple[int, int]:
        """The stages that a cluster can move to alone."""
        stage = self.ledger.stage
        low = max((stage[a] + ((a, cluster) in self.strict) for a in self.before[cluster]), default=0)
        high = min(
            (stage[b] - ((cluster, b) in self.strict) for b in self.after[cluster]), default=len(self.stages) - 1
        )
        return max(low, self.first[cluster]), min(high, self.last[cluster])

    def _score(self) -> Score:
        loads = [self.ledger.load(d) for d in range(len(self.stages.speed))]
        worst = max(loads)
        return worst, sum(load >= worst * (1 - 1e-12) for load in loads), sum(loads)
