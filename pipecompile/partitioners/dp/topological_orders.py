"""Linear orders of the clusters that respect precedence: the input of the dynamic program along one order.

All are list schedules: the ready cluster of least priority is placed next. The orders differ in the priority. If pins or
pairs apart restrict the stages of clusters, one barrier per boundary separates the clusters that must be before it from
those that must be after it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from heapq import heapify, heappop, heappush
from math import inf

from pipecompile.partitioners.clusters import Clusters, adjacency
from pipecompile.partitioners.constraints import StageRanges

__all__ = ["candidate_orders", "order_by_key"]

Priority = Callable[[int, int], float]
"""(cluster, number of clusters placed when it became ready) -> priority; the least is placed first."""

Adjacency = tuple[list[list[int]], list[list[int]]]
"""Direct predecessors and direct successors of every cluster."""


def candidate_orders(clusters: Clusters, ranges: StageRanges | None = None) -> Iterator[list[int]]:
    """Yield different good orders, each once: as numbered, by level, depth first, deepest first; from either end."""
    predecessors, successors = _with_barriers(adjacency(clusters), ranges)
    seen: set[tuple[int, ...]] = set()
    for forward in (True, False):
        sources, sinks = (predecessors, successors) if forward else (successors, predecessors)
        for priority in _priorities(sources, sinks, forward=forward):
            order = _list_schedule(sources, sinks, priority, len(clusters))[:: 1 if forward else -1]
            if tuple(order) not in seen:
                seen.add(tuple(order))
                yield order


def order_by_key(clusters: Clusters, key: Sequence[float], ranges: StageRanges | None = None) -> list[int]:
    """Return a topological order that places the ready cluster with the least key next."""
    predecessors, successors = _with_barriers(adjacency(clusters), ranges)
    return _list_schedule(predecessors, successors, lambda cluster, _: key[cluster], len(clusters))


def _with_barriers(graph: Adjacency, ranges: StageRanges | None) -> Adjacency:
    """Add one barrier per stage, numbered after the clusters: after all clusters before the stage, before all others."""
    if ranges is None:
        return graph
    predecessors, successors = graph
    earliest, latest = ranges
    n, n_stages = len(predecessors), 1 + max(latest, default=0)
    predecessors, successors = predecessors + [[] for _ in range(n_stages)], successors + [[] for _ in range(n_stages)]
    arcs = [(n + s, n + s + 1) for s in range(n_stages - 1)]
    arcs += [(v, n + latest[v] + 1) for v in range(n) if latest[v] + 1 < n_stages]
    arcs += [(n + earliest[v], v) for v in range(n) if earliest[v] > 0]
    for a, b in arcs:
        successors[a].append(b)
        predecessors[b].append(a)
    return predecessors, successors


def _priorities(
    sources: Sequence[Sequence[int]], sinks: Sequence[Sequence[int]], *, forward: bool
) -> tuple[Priority, ...]:
    depth = _depths(sources, sinks)

    def as_numbered(cluster: int, _placed: int) -> float:
        return cluster if forward else -cluster

    def by_level(cluster: int, _placed: int) -> float:
        return depth[cluster]

    def depth_first(_cluster: int, placed: int) -> float:
        return -placed

    def deepest_first(cluster: int, _placed: int) -> float:
        return -depth[cluster]

    return as_numbered, by_level, depth_first, deepest_first


def _list_schedule(
    sources: Sequence[Sequence[int]], sinks: Sequence[Sequence[int]], priority: Priority, n: int
) -> list[int]:
    """Return the first `n` vertices, the clusters, in order. A barrier is passed as soon as it is ready, and left out."""
    missing = [len(predecessors) for predecessors in sources]
    ready = [(priority(v, 0) if v < n else -inf, v) for v, count in enumerate(missing) if not count]
    heapify(ready)
    order: list[int] = []
    while ready:
        _, cluster = heappop(ready)
        if cluster < n:
            order.append(cluster)
        for consumer in sinks[cluster]:
            missing[consumer] -= 1
            if not missing[consumer]:
                heappush(ready, (priority(consumer, len(order)) if consumer < n else -inf, consumer))
    return order


def _depths(sources: Sequence[Sequence[int]], sinks: Sequence[Sequence[int]]) -> list[int]:
    """Return the length of the longest path to every cluster from the end where the order starts."""
    depth = [0] * len(sources)
    for cluster in _list_schedule(sources, sinks, lambda cluster, _: cluster, len(sources)):
        depth[cluster] = max((depth[source] + 1 for source in sources[cluster]), default=0)
    return depth
