"""Simulated annealing of a cut towards a smaller bottleneck: it leaves local minima of `local_search.py`, where the slowest stages
cannot give anything to their neighbours.

    load   ██        excess = what is above the target, squared, over all stages, and a little for each second of it
    target ██▁▁██    the target is just below the bottleneck: once no stage is above it, the cut is better
           ██████

A move takes one cluster to another stage that precedence allows, and in half of the tries another cluster back. A move that adds d to
the excess is made with probability exp(-d / T); T falls during a round by three orders of magnitude. Kirkpatrick, Gelatt, Vecchi,
"Optimization by simulated annealing", Science 220, 1983.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp
from random import Random
from time import monotonic

from pipecompile.partitioners.clusters import Clusters, adjacency
from pipecompile.partitioners.constraints import StageRanges
from pipecompile.partitioners.machine import Machine
from pipecompile.partitioners.plain_loads import PlainLoads

__all__ = ["anneal"]

_ROUNDS = 2
"""Rounds of cooling in the time that there is."""

_BELOW = 1e-4, 0.01
"""The least and the most by which the target of a round is below the bottleneck, as a share of it."""

_HEAT = 3e-4, 1e-2
"""The least and the most temperature that a round begins with. A stage a tenth of the mean load above the target has an excess of 0.012."""

_COOLED = 1e-3
"""Temperature at the end of a round, as a share of that at its begin."""

_LINEAR = 0.02
"""Weight of the excess itself beside its square: small ones would count for nothing."""

_LISTED = 1000
"""Moves for which the clusters that can move are listed at once: in a large graph most cannot."""

_NEXT = 0.7
"""Share of the moves that go to the next stage; the rest goes to any."""

_BACK, _TRIES = 0.5, 4
"""Share of the moves for which a cluster is moved back, and clusters that are drawn to find one that can."""


def anneal(
    clusters: Clusters,
    machine: Machine,
    assignment: Sequence[int],
    ranges: StageRanges | None,
    deadline: float,
    seed: int = 0,
) -> list[int]:
    """Return the cut with the least bottleneck that is found by the deadline, at worst the given one. `seed` is that of the moves.

    The cut stays as it is where devices have several stages, memory limits, links of unlike speed or links beside the work, or stages
    recompute.
    """
    is_plain = machine.is_one_to_one and machine.links is None and not machine.overlap
    is_plain = is_plain and not (machine.has_memory_limit or any(machine.recompute))
    best, begin, draw = list(assignment), monotonic(), Random(seed)
    if not is_plain or not any(clusters.time) or len(machine) < 2:
        return best
    for number in range(1, _ROUNDS + 1):
        end = begin + (deadline - begin) * number / _ROUNDS
        best = _CoolingRound(clusters, machine, best, ranges, draw).best_before(end)
    return best


class _CoolingRound:
    """One round of cooling, from the best cut so far."""

    def __init__(
        self, clusters: Clusters, machine: Machine, start: list[int], ranges: StageRanges | None, draw: Random
    ) -> None:
        n, n_stages = len(clusters), len(machine)
        self.plain, self.draw, self.strict = PlainLoads(clusters, machine, start), draw, clusters.strict_arcs
        self.stage_of, self.loads = self.plain.stage_of, self.plain.loads
        self.predecessors, self.successors = adjacency(clusters)
        self.earliest, self.latest = ranges or ([0] * n, [n_stages - 1] * n)
        self.best, self.least = list(start), max(self.loads)
        self.mean = sum(clusters.time) / sum(machine.speed)
        self._aim()

    def best_before(self, end: float) -> list[int]:
        """Return the cut with the least bottleneck that the moves until `end`, in seconds of `monotonic`, visit."""
        begin, excess, (least, most) = monotonic(), self._excess(), _HEAT
        first = least * (most / least) ** self.draw.random()
        while (now := monotonic()) < end and (movable := self._movable()):
            heat = first * _COOLED ** ((now - begin) / (end - begin))
            for _ in range(_LISTED):
                moved = self._move(movable[int(self.draw.random() * len(movable))])
                if not moved:
                    continue
                value = self._excess()
                if value > excess and self.draw.random() >= exp((excess - value) / heat):
                    for v, origin in reversed(moved):
                        self.plain.move(v, origin)
                else:
                    excess = self._kept(value)
        return self.best

    def _kept(self, excess: float) -> float:
        """Note the present cut if it is the best, and return its excess: the target is lower then."""
        worst = max(self.loads) if excess < self.excess_at_best else self.least
        if worst >= self.least:
            return excess
        self.best, self.least = list(self.stage_of), worst
        self._aim()
        return self._excess()

    def _aim(self) -> None:
        """Set the target below the least bottleneck so far."""
        least, most = _BELOW
        self.target = self.least * (1 - least - most * self.draw.random() ** 2)
        over = (self.least - self.target) / self.mean
        self.excess_at_best = len(self.loads) * (over * over + _LINEAR * over)  # of a cut that is better, at most

    def _movable(self) -> list[int]:
        ranges = map(self._range, range(len(self.stage_of)))
        return [v for v, (low, high) in enumerate(ranges) if low < high]

    def _move(self, v: int) -> list[tuple[int, int]]:
        """Move a cluster, and perhaps another one back. Return each with the stage that it left; none if it cannot move."""
        random, origin = self.draw.random, self.stage_of[v]
        low, high = self._range(v)
        step = 1 if random() < 0.5 else -1
        target = origin + step if random() < _NEXT else low + int(random() * (high - low + 1))
        if target == origin or not low <= target <= high:
            return []
        self.plain.move(v, target)
        other = self._moved_back(v, target, origin) if random() < _BACK else None
        return [(v, origin)] if other is None else [(v, origin), (other, target)]

    def _moved_back(self, v: int, stage: int, target: int) -> int | None:
        """Move a cluster other than v from a stage to a target, if one of a few that are drawn can go there."""
        for _ in range(_TRIES):
            other = int(self.draw.random() * len(self.stage_of))
            if self.stage_of[other] == stage and other != v:
                low, high = self._range(other)
                if low <= target <= high:
                    self.plain.move(other, target)
                    return other
        return None

    def _range(self, v: int) -> tuple[int, int]:
        """Return the first and the last stage that a cluster can move to alone."""
        stage_of, low, high = self.stage_of, self.earliest[v], self.latest[v]
        for a in self.predecessors[v]:
            low = max(low, stage_of[a])
        for b in self.successors[v]:
            high = min(high, stage_of[b])
        if self.strict:
            low = max([low, *(stage_of[a] + 1 for a in self.predecessors[v] if (a, v) in self.strict)])
            high = min([high, *(stage_of[b] - 1 for b in self.successors[v] if (v, b) in self.strict)])
        return low, high

    def _excess(self) -> float:
        target, mean, total = self.target, self.mean, 0.0
        for load in self.loads:
            if load > target:
                over = (load - target) / mean
                total += over * over + _LINEAR * over
        return total
