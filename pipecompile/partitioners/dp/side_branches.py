"""Side branches: clusters that compute a value, such as noise or a mask, for one consumer, without the data of the main input.

    noise ──╮            ╭─▶ view ─╮       a side branch could be computed on any stage before its consumer: each multiplies the
    x ─▶ a ─▶ b    table ┤         ├─▶ ..  down-sets. Joined with its consumer it multiplies nothing. A branch may read what other
                         ╰─▶ view ─▶ c     clusters off the main path compute for many, here a table of positions

Joined, a cut may be worse than the best one: the stage of b cannot shed the work of the branch. It gains by that at most its
*relief*: the work, and the seconds in which it receives what the branch reads, less those in which it receives the result instead.
The stage that takes the work over gains at least `ratio` times as much load, since it sends the result. Where a branch takes no
longer than its result the relief is 0. Nor can a branch on another stage send its result on in place of the table: for a bound the
stage of the table, a *relay*, sends it once. Where there is neither relief nor relay, joining loses nothing. So views on the main
path, which take no time, are joined as well.

A bound is a relaxation: stages shed any part of their relief, in any pieces, and owe `ratio` times as much to stages before.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import inf

import numpy as np
from numpy.typing import NDArray

from pipecompile.partitioners.clusters import Clusters, Flow, adjacency, merge, transitive_closure

__all__ = ["BranchPart", "JoinedBranches", "join_side_branches", "main_clusters"]


@dataclass(frozen=True, slots=True)
class BranchPart:
    """Clusters of a side branch that can leave the stage of their consumer together, what must come before them, and what they read that
    others read too; the seconds that the stage gains, and the least load that another one gets. The last member sends.
    """

    consumer: int
    members: tuple[int, ...]
    after: tuple[int, ...]
    shared: tuple[int, ...]
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
    """Return the clusters with each side branch of at most `most` seconds joined with its consumer. O(clusters^2) bytes."""
    branches = _Branches(clusters, speed, most)
    joined = merge(clusters, [(v, consumer) for v, consumer in branches.consumer_of.items()])
    relief = np.zeros(len(joined))
    index = {name: number for number, names in enumerate(joined.members) for name in names}
    parts = branches.parts()
    for consumer, seconds in branches.reliefs(parts).items():
        relief[index[clusters.members[consumer][0]]] = seconds
    ratio = min((part.load / part.gain for part in parts if part.gain > 0), default=1.0)
    relays = frozenset(index[clusters.members[source][0]] for part in parts for source in part.shared)
    return JoinedBranches(joined, relief, ratio, parts, relays)


def main_clusters(clusters: Clusters) -> NDArray[np.bool_]:
    """Return whether each cluster depends on the data of the source on which most of the work depends."""
    arcs, time = _data_arcs(clusters), np.array(clusters.time)
    closure = transitive_closure(replace(clusters, arcs=arcs))
    sources = set(range(len(clusters))) - {b for _, b in arcs}
    main: NDArray[np.bool_] = closure[max(sorted(sources), key=lambda v: float(closure[v] @ time))]
    return main


def _data_arcs(clusters: Clusters) -> tuple[tuple[int, int], ...]:
    """Return the pairs of clusters of which the second reads the first."""
    return tuple(sorted({(flow.source, consumer) for flow in clusters.flows for consumer in flow.consumers}))


class _Branches:
    """`consumer_of` has the cluster that each side branch is joined with."""

    def __init__(self, clusters: Clusters, speed: float, most: float) -> None:
        self.most, self.time = most, np.array(clusters.time) / speed
        self.sent, self.inputs = np.zeros(len(clusters)), [list[Flow]() for _ in range(len(clusters))]
        for flow in clusters.flows:
            self.sent[flow.source] += flow.time
            for consumer in flow.consumers:
                self.inputs[consumer].append(flow)
        self.sources, self.readers = adjacency(replace(clusters, arcs=_data_arcs(clusters)))
        self.closure = transitive_closure(clusters)
        self.predecessors, self.successors = adjacency(clusters)
        self.is_main = main_clusters(clusters)
        self.consumer_of = self._consumers(set(np.flatnonzero(~self.is_main | (self.time == 0)).tolist()))

    def _consumers(self, free: set[int]) -> Mapping[int, int]:
        """Return the consumer of each side branch among some clusters."""
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
        """Yield the parts of branches that take no longer than allowed, read no main data that others read too, and send no less than they
        read. What gains by leaving is for a cluster of the main path: else it is the begin of a tower.
        """
        above: dict[int, set[int]] = {}
        for v, consumer in sorted(consumer_of.items()):
            members = {v}.union(*(above.get(source, ()) for source in self.sources[v]))
            flows = {flow for member in members for flow in self.inputs[member] if flow.source not in members}
            after = tuple(sorted({a for member in members for a in self.predecessors[member]} - members))
            shared = tuple(sorted({flow.source for flow in flows if not members.issuperset(flow.consumers)}))
            work, received = float(self.time[list(members)].sum()), sum(flow.time for flow in flows)
            sent = float(self.sent[v])
            gain, load = work + received - sent, work + sent - received
            is_small = work <= self.most and (gain <= 0 or bool(self.is_main[consumer]))
            if is_small and received <= sent and not self.is_main[list(shared)].any():
                above[v] = members
                yield BranchPart(consumer, tuple(sorted(members)), after, shared, gain, load)

    def reliefs(self, parts: Iterable[BranchPart]) -> dict[int, float]:
        """Return the largest gain of the stage of each consumer."""
        reliefs, best = dict[int, float](), dict[int, float]()
        for part in parts:  # in the order of the clusters that send
            v = part.members[-1]
            best[v] = max(part.gain, sum(best.get(source, 0.0) for source in self.sources[v]), 0.0)
            if not all(reader in self.consumer_of for reader in self.readers[v]):
                reliefs[part.consumer] = reliefs.get(part.consumer, 0.0) + best[v]
        return reliefs
