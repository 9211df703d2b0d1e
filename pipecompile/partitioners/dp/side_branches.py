"""Side branches: clusters that compute something from no input, for one consumer, such as noise, a mask or a table of positions.

    noise ──╮                      a side branch could be computed on any stage before; each multiplies the down-sets.
    x ─▶ a ─▶ b ─▶ c ...           Joined with its consumer, here b, it multiplies nothing

Joined, a cut may be worse than the best one: the stage of b cannot shed the work of the branch. It gains by that at most its *relief*, the
work less the seconds in which it receives the tensor instead, and the stage that takes the work over gains at least `ratio` times as much
load, since it sends the tensor. Where a branch takes no longer than its tensor the relief is 0, and joining loses nothing.

A bound is a relaxation: stages shed any part of their relief, in any parts, and owe `ratio` times as much to stages before.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import inf

import numpy as np
from numpy.typing import NDArray

from pipecompile.partitioners.clusters import Clusters, adjacency, merge, transitive_closure

__all__ = ["JoinedBranches", "BranchPart", "join_side_branches"]


@dataclass(frozen=True, slots=True)
class BranchPart:
    """Clusters of a side branch that can leave the stage of their consumer together, and the seconds that it gains."""

    consumer: int
    members: tuple[int, ...]
    gain: float


@dataclass(frozen=True, slots=True)
class JoinedBranches:
    """Clusters with their side branches. `relief` has the seconds of work at speed 1 that the stage of each cluster can gain by
    shedding; `ratio` is the least load elsewhere per second of relief. `parts` are what can be shed, as clusters before joining.
    """

    clusters: Clusters
    relief: NDArray[np.float64]
    ratio: float
    parts: tuple[BranchPart, ...] = ()


def join_side_branches(clusters: Clusters, speed: float, most: float = inf) -> JoinedBranches:
    """Return the clusters with each side branch of at most so many seconds joined with its consumer. O(clusters^2) bytes."""
    branches = _Branches(clusters, speed, most)
    joined = merge(clusters, [(v, consumer) for v, consumer in branches.consumer_of.items()])
    relief = np.zeros(len(joined))
    index = {names: number for number, cluster in enumerate(joined.members) for names in cluster}
    parts = branches.parts()
    for consumer, seconds in branches.reliefs().items():
        relief[index[clusters.members[consumer][0]]] = seconds
    ratio = min((1.0 + 2.0 * float(branches.sent[part.members[-1]]) / part.gain for part in parts), default=1.0)
    return JoinedBranches(joined, relief, ratio, parts)


class _Branches:
    """`consumer_of` has the cluster that each side branch is joined with."""

    def __init__(self, clusters: Clusters, speed: float, most: float) -> None:
        self.most = most
        self.time = np.array(clusters.time) / speed
        self.sent = np.zeros(len(clusters))
        for flow in clusters.flows:
            self.sent[flow.source] += flow.time
        data = {(flow.source, consumer) for flow in clusters.flows for consumer in flow.consumers}
        self.sources, self.readers = adjacency(replace(clusters, arcs=tuple(sorted(data))))
        self.closure = transitive_closure(clusters)
        _, self.successors = adjacency(clusters)
        self.consumer_of = self._consumers(set(np.flatnonzero(~self._main(clusters, data)).tolist()))

    def _main(self, clusters: Clusters, data: set[tuple[int, int]]) -> NDArray[np.bool_]:
        """Return whether each cluster depends on the data of the source from which most of the work depends."""
        closure = transitive_closure(replace(clusters, arcs=tuple(sorted(data))))
        sources = [v for v, before in enumerate(self.sources) if not before]
        most: NDArray[np.bool_] = closure[max(sources, key=lambda v: float(closure[v] @ self.time))]
        return most

    def _consumers(self, free: set[int]) -> Mapping[int, int]:
        """Return the consumer of each side branch among clusters without data of the main source."""
        while True:
            consumer_of: dict[int, int] = {}
            for v in sorted(free, reverse=True):
                ends = {consumer_of.get(reader, reader) for reader in self.readers[v]}
                if len(ends) == 1 and self._is_after(self.successors[v], next(iter(ends)), consumer_of):
                    (consumer_of[v],) = ends
            above = self._above(consumer_of)
            if above.keys() == free:
                return consumer_of
            free = set(above)

    def _is_after(self, successors: list[int], consumer: int, consumer_of: Mapping[int, int]) -> bool:
        """Return whether all that must come after a cluster comes after its consumer too."""
        return all(self.closure[consumer, consumer_of.get(after, after)] for after in successors)

    def _above(self, consumer_of: Mapping[int, int]) -> dict[int, set[int]]:
        """Return, per cluster of a side branch, the clusters before it and itself, where all of them are in side branches and together
        take no longer than allowed.
        """
        above: dict[int, set[int]] = {}
        for v in sorted(consumer_of):
            if all(source in above for source in self.sources[v]):
                members = {v}.union(*(above[source] for source in self.sources[v]))
                if self.time[list(members)].sum() <= self.most:
                    above[v] = members
        return above

    def parts(self) -> tuple[BranchPart, ...]:
        """Return each cluster of a side branch with all before it, where a stage gains by shedding them. The last one sends."""
        parts = list[BranchPart]()
        for v, members in self._above(self.consumer_of).items():
            gain = float(self.time[list(members)].sum() - self.sent[v])
            if gain > 0:
                parts.append(BranchPart(self.consumer_of[v], tuple(sorted(members)), gain))
        return tuple(parts)

    def reliefs(self) -> dict[int, float]:
        """Return what the stage of each consumer gains at most."""
        gains = {part.members[-1]: part.gain for part in self.parts()}
        reliefs, best = dict[int, float](), dict[int, float]()
        for v, consumer in sorted(self.consumer_of.items()):
            best[v] = max(gains.get(v, 0.0), sum(best[source] for source in self.sources[v]))
            if not all(reader in self.consumer_of for reader in self.readers[v]):
                reliefs[consumer] = reliefs.get(consumer, 0.0) + best[v]
        return reliefs
