"""Linear orders of the clusters that respect precedence: the material of the dynamic program.

All are list schedules: again and again the ready cluster of the least priority is placed. They differ in that priority.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from heapq import heapify, heappop, heappush

from pipecompile.partitioners.clusters import Clusters

__all__ = ["neighbours", "orders", "sorted_by"]

Priority = Callable[[int, int], float]
"""(cluster, how many were placed when it became ready) -> what to place first: the least."""


def orders(clusters: Clusters) -> Iterator[list[int]]:
    """Different good orders, each once: as given, by level, depth first, deepest first; from either end."""
    before, after = neighbours(clusters)
    seen: set[tuple[int, ...]] = set()
    for forward in (True, False):
        sources, sinks = (before, after) if forward else (after, before)
        for rule in _rules(sources, sinks, forward=forward):
            order = _listed(sources, sinks, rule)[:: 1 if forward else -1]
            if tuple(order) not in seen:
                seen.add(tuple(order))
                yield order


def _rules(sources: Sequence[Sequence[int]], sinks: Sequence[Sequence[int]], *, forward: bool) -> tuple[Priority, ...]:
    depth = _depths(sources, sinks)

    def as_given(cluster: int, _tick: int) -> float:
        return cluster if forward else -cluster

    def by_level(cluster: int, _tick: int) -> float:
        return depth[cluster]

    def depth_first(_cluster: int, tick: int) -> float:
        return -tick

    def deepest_first(cluster: int, _tick: int) -> float:
        return -depth[cluster]

    return as_given, by_level, depth_first, deepest_first


def sorted_by(clusters: Clusters, key: Sequence[float]) -> list[int]:
    """A topological order that follows a key wherever precedence leaves the choice."""
    before, after = neighbours(clusters)
    return _listed(before, after, lambda cluster, _: key[cluster])


def neighbours(clusters: Clusters) -> tuple[list[list[int]], list[list[int]]]:
    """Direct predecessors and direct successors of every cluster."""
    before: list[list[int]] = [[] for _ in range(len(clusters))]
    after: list[list[int]] = [[] for _ in range(len(clusters))]
    for a, b in clusters.arcs:
        before[b].append(a)
        after[a].append(b)
    return before, after


def _listed(before: Sequence[Sequence[int]], after: Sequence[Sequence[int]], priority: Priority) -> list[int]:
    missing = Counter({cluster: len(sources) for cluster, sources in enumerate(before)})
    ready = [(priority(cluster, 0), cluster) for cluster, count in missing.items() if not count]
    heapify(ready)
    order: list[int] = []
    while ready:
        _, cluster = heappop(ready)
        order.append(cluster)
        for consumer in after[cluster]:
            missing[consumer] -= 1
            if not missing[consumer]:
                heappush(ready, (priority(consumer, len(order)), consumer))
    return order


def _depths(sources: Sequence[Sequence[int]], sinks: Sequence[Sequence[int]]) -> list[int]:
    """The longest path to every cluster from the end where the order starts."""
    depth = [0] * len(sources)
    for cluster in _listed(sources, sinks, lambda cluster, _: cluster):
        depth[cluster] = max((depth[source] + 1 for source in sources[cluster]), default=0)
    return depth
