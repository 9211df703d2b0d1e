"""Sets of clusters that can be a stage, and climbs to heavy ones: the columns of `column_bound.py`.

    a -> b -> c        {a, b} can be a stage; {a, c} cannot, as b is between them: sets are convex

A set is a bit mask. Its load is its work, what it receives, and what it sends, each tensor once: no more than the load of such a stage
in any cut. A climb adds the heaviest cluster that leaves the load within a limit, or puts it in the place of a lighter one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from random import Random

import numpy as np

from pipecompile.partitioners.clusters import Clusters, transitive_closure
from pipecompile.partitioners.machine import Machine

__all__ = ["StageSets", "mask_of", "members_of"]

_FAR = 10
"""Clusters without a tensor in common with the set that are tried for an addition, drawn at random."""

_HEAVIER = 1e-9
"""Least gain of weight by a change."""


def mask_of(clusters: Iterable[int]) -> int:
    """Return the set of some clusters."""
    return sum(1 << v for v in set(clusters))


def members_of(mask: int) -> Iterator[int]:
    """Yield the clusters of a set, ascending."""
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest


class StageSets:
    """The sets of a graph whose stages are alike: one speed, and the least factor on the time of a tensor."""

    def __init__(self, clusters: Clusters, machine: Machine) -> None:
        closure, n = transitive_closure(clusters), len(clusters)
        np.fill_diagonal(closure, val=False)
        self.descendants = [mask_of(np.flatnonzero(row).tolist()) for row in closure]
        self.ancestors = [mask_of(np.flatnonzero(column).tolist()) for column in closure.T]
        self.work = [time / machine.speed[0] for time in clusters.time]
        self.flows = [
            (1 << flow.source, mask_of(flow.consumers), flow.time * machine.min_link_factor) for flow in clusters.flows
        ]
        self.most = list(self.work)
        self.flows_of: list[list[int]] = [[] for _ in range(n)]
        self.near = [0] * n
        for number, (source, consumers, seconds) in enumerate(self.flows):
            for v in members_of(source | consumers):
                self.most[v] += seconds
                self.flows_of[v].append(number)
                self.near[v] |= source | consumers

    def load(self, mask: int) -> float:
        """Return the seconds of a stage with these clusters."""
        touched = {number for v in members_of(mask) for number in self.flows_of[v]}
        return sum(self.work[v] for v in members_of(mask)) + sum(self._moved(number, mask) for number in touched)

    def _moved(self, number: int, mask: int) -> float:
        """Return the seconds for which the stage sends or receives a flow."""
        source, consumers, seconds = self.flows[number]
        crosses = consumers & ~mask if mask & source else consumers & mask
        return seconds if crosses else 0.0

    def is_convex(self, mask: int) -> bool:
        """Return whether no cluster outside is between two of the set."""
        after = before = 0
        for v in members_of(mask):
            after |= self.descendants[v]
            before |= self.ancestors[v]
        return not after & before & ~mask

    def climbed(self, mask: int, weights: Sequence[float], limit: float, draw: Random) -> int:
        """Return a set that no change makes heavier with a load of at most `limit`, from a set of such a load."""
        load = self.load(mask)
        while True:
            for _, change in sorted(self._changes(mask, load, weights, limit, draw), reverse=True):
                changed = mask ^ change
                if (value := self._changed_load(mask, load, change)) <= limit and self.is_convex(changed):
                    mask, load = changed, value
                    break
            else:
                return mask

    def _changes(
        self, mask: int, load: float, weights: Sequence[float], limit: float, draw: Random
    ) -> Iterator[tuple[float, int]]:
        """Yield what makes a set heavier and may leave its load within the limit, and by how much: a cluster is added, perhaps in the
        place of another one.
        """
        members, near = list(members_of(mask)), 0
        for v in members:
            near |= self.near[v]
        far = [v for v in draw.sample(range(len(weights)), min(_FAR, len(weights))) if not mask >> v & 1]
        for v in {*members_of(near & ~mask), *far}:
            above = self._changed_load(mask, load, 1 << v) - limit
            if above <= 0:
                yield weights[v], 1 << v
            else:
                least = weights[v] - _HEAVIER
                for other in members:
                    if weights[other] < least and self.most[other] >= above:
                        yield weights[v] - weights[other], 1 << v | 1 << other

    def _changed_load(self, mask: int, load: float, change: int) -> float:
        """Return the load of a set after some clusters entered or left it."""
        for v in members_of(change):
            changed = mask ^ 1 << v
            load += self.work[v] if changed >> v & 1 else -self.work[v]
            load += sum(self._moved(number, changed) - self._moved(number, mask) for number in self.flows_of[v])
            mask = changed
        return load
