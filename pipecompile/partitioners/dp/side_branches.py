"""Side branches: clusters that compute something without the data of the main input, for one consumer, such as noise or a mask.

    noise ──╮            ╭─▶ view ─╮       a side branch could be computed on any stage before its consumer: each multiplies the
    x ─▶ a ─▶ b    table ┤         ├─▶ ..  down-sets. Joined with its consumer it multiplies nothing. A branch may read what other
                         ╰─▶ view ─▶ c     clusters off the main path compute for many, here a table of positions

Joined, a cut may be worse than the best one: the stage of b cannot shed the work of the branch. It gains by that at most its *relief*:
the work, and the seconds in which it receives what the branch reads, less those in which it receives the result instead. The stage that
takes the work over gains at least `ratio` times as much load, since it sends the result. Where a branch takes no longer than its result
the relief is 0. Nor can a branch on another stage send its result on in place of the table: for a bound the stage of the table, a *relay*,
sends it once. Where there is neither relief nor relay, joining loses nothing.

A bound is a relaxation: stages shed any part of their relief, in any pieces, and owe `ratio` times as much to stages before.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import inf

import numpy as np
from numpy.typing import NDArray

from pipecompile.partitioners.clusters import Clusters, Flow, adjacency, merge, transitive_closure

__all__ = ["JoinedBranches", "BranchPart", "join_side_branches"]


@dataclass(frozen=True, slots=True)
class BranchPart:
    """Clusters of a side branch that can leave the stage of their consumer together, what they read from outside of the branch, the
    seconds that the stage gains, and the least load that another one gets. The last member sends.
    """

    consumer: int
    members: tuple[int, ...]
    sources: tuple[int, ...]
    gain: float
    load: float


@dataclass(frozen=True, slots=True)
class JoinedBranches:
    """Clusters with their side branches. `relief` has the seconds of work at speed 1 that the stage of each cluster can gain by
    shedding; `ratio` is the least load elsewhere per second of relief. `parts` are what can be shed, as clusters before joining.
    `relays` are clusters that branches read from.
    """

    clusters: Clusters
    relief: NDArray[np.float64]
    ratio: float
    parts: tuple[BranchPart, ...] = ()
    relays: frozenset[int] = frozenset()

    @property
    def is_exact(self) -> bool:
        """Whether joining loses nothing."""
        return not self.relays and not self.relief.any()


def join_side_branches(clusters: Clusters, speed: float, most: float = inf) -> JoinedBranches:
    """Return the clusters with each side branch of at most so many seconds joined with its consumer. O(clusters^2) bytes."""
    branches = _Branches(clusters, speed, most)
    joined = merge(clusters, [(v, consumer) for v, consumer in branches.consumer_of.items()])
    relief = np.zeros(len(joined))
    index = {name: number for number, names in enumerate(joined.members) for name in names}
    parts = branches.parts()
    for consumer, seconds in branches.reliefs(parts).items():
        relief[index[clusters.members[consumer][0]]] = seconds
    ratio = min((part.load / part.gain for part in parts if part.gain > 0), default=1.0)
    relays = frozenset(index[clusters.members[source][0]] for part in parts for source in part.sources)
    return JoinedBranches(joined, relief, ratio, parts, relays)


class _Branches:
    """`consumer_of` has the cluster that each side branch is joined with."""

    def __init__(self, clusters: Clusters, speed: float, most: float) -> None:
        self.most, self.time = most, np.array(clusters.time) / speed
        self.sent, self.inputs = np.zeros(len(clusters)), [list[Flow]() for _ in range(len(clusters))]
        for flow in clusters.flows:
            self.sent[flow.source] += flow.time
            for consumer in flow.consumers:
                self.inputs[consumer].append(flow)
        data = {(flow.source, consumer) for flow in clusters.flows for consumer in flow.consumers}
        self.sources, self.readers = adjacency(replace(clusters, arcs=tuple(sorted(data))))
        self.closure = transitive_closure(clusters)
        _, self.successors = adjacency(clusters)
        self.is_main = self._main(clusters, data)
        self.consumer_of = self._consumers(set(np.flatnonzero(~self.is_main).tolist()))

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
            kept = {part.members[-1] for part in self._parts(consumer_of)}
            if kept == free:
                return consumer_of
            free = kept

    def _is_after(self, successors: list[int], consumer: int, consumer_of: Mapping[int, int]) -> bool:
        """Return whether all that must come after a cluster comes after its consumer too."""
        return all(self.closure[consumer, consumer_of.get(after, after)] for after in successors)

    def parts(self) -> tuple[BranchPart, ...]:
        """Return each cluster of a side branch, with all before it in the branch."""
        return tuple(self._parts(self.consumer_of))

    def _parts(self, consumer_of: Mapping[int, int]) -> Iterator[BranchPart]:
        """Yield the parts of branches that take no longer than allowed, read nothing of the main data, and send no less than they read."""
        above: dict[int, set[int]] = {}
        for v, consumer in sorted(consumer_of.items()):
            members = {v}.union(*(above.get(source, ()) for source in self.sources[v]))
            flows = {flow for member in members for flow in self.inputs[member] if flow.source not in members}
            sources = tuple(sorted({flow.source for flow in flows}))
            work, received = float(self.time[list(members)].sum()), sum(flow.time for flow in flows)
            sent = float(self.sent[v])
            if work <= self.most and received <= sent and not self.is_main[list(sources)].any():
                above[v] = members
                gain, load = work + received - sent, work + sent - received
                yield BranchPart(consumer, tuple(sorted(members)), sources, gain, load)

    def reliefs(self, parts: Iterable[BranchPart]) -> dict[int, float]:
        """Return what the stage of each consumer gains at most."""
        reliefs, best = dict[int, float](), dict[int, float]()
        for part in parts:  # in the order of the clusters that send
            v = part.members[-1]
            best[v] = max(part.gain, sum(best.get(source, 0.0) for source in self.sources[v]), 0.0)
            if not all(reader in self.consumer_of for reader in self.readers[v]):
                reliefs[part.consumer] = reliefs.get(part.consumer, 0.0) + best[v]
        return reliefs
