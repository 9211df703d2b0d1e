"""Linear orders of the clusters that respect precedence: the material of the dynamic program.

All are list schedules: again and again the ready cluster of the least priority is placed. They differ in that priority. When
pins or pairs apart keep a cluster out of some stages, a barrier per boundary keeps those that must be before it from those that
must be after it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from heapq import heapify, heappop, heappush
from math import inf

from pipecompile.partitioners.bounds.reachability import neighbours
from pipecompile.partitioners.clusters import Clusters
from pipecompile.partitioners.constraints import Span

__all__ = ["orders", "sorted_by"]

Priority = Callable[[int, int], float]
"""(cluster, how many were placed when it became ready) -> what to place first: the least."""

Around = tuple[list[list[int]], list[list[int]]]


def orders(clusters: Clusters, span: Span | None = None) -> Iterator[list[int]]:
    """Different good orders, each once: as given, by level, depth first, deepest first; from either end."""
    before, after = _barred(neighbours(clusters), span)
    seen: set[tuple[int, ...]] = set()
    for forward in (True, False):
        sources, sinks = (before, after) if forward else (after, before)
        for rule in _rules(sources, sinks, forward=forward):
            order = _listed(sources, sinks, rule, len(clusters))[:: 1 if forward else -1]
            if tuple(order) not in seen:
                seen.add(tuple(order))
                yield order


def sorted_by(clusters: Clusters, key: Sequence[float], span: Span | None = None) -> list[int]:
    """A topological order that follows a key wherever precedence leaves the choice."""
    before, after = _barred(neighbours(clusters), span)
    return _listed(before, after, lambda cluster, _: key[cluster], len(clusters))


def _barred(around: Around, span: Span | None) -> Around:
    """With barriers, numbered after the clusters: one per stage, after all that is before it and before the rest."""
    if span is None:
        return around
    before, after = around
    first, last = span
    n, n_stages = len(before), 1 + max(last, default=0)
    before, after = before + [[] for _ in range(n_stages)], after + [[] for _ in range(n_stages)]
    arcs = [(n + s, n + s + 1) for s in range(n_stages - 1)]
    arcs += [(v, n + last[v] + 1) for v in range(n) if last[v] + 1 < n_stages]
    arcs += [(n + first[v], v) for v in range(n) if first[v] > 0]
    for a, b in arcs:
        after[a].append(b)
        before[b].append(a)
    return before, after


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


def _listed(before: Sequence[Sequence[int]], after: Sequence[Sequence[int]], priority: Priority, n: int) -> list[int]:
    """The first n are clusters; a barrier is passed as soon as it is ready, and left out."""
    missing = [len(sources) for sources in before]
    ready = [(priority(v, 0) if v < n else -inf, v) for v, count in enumerate(missing) if not count]
    heapify(ready)
    order: list[int] = []
    while ready:
        _, cluster = heappop(ready)
        if cluster < n:
            order.append(cluster)
        for consumer in after[cluster]:
            missing[consumer] -= 1
            if not missing[consumer]:
                heappush(ready, (priority(consumer, len(order)) if consumer < n else -inf, consumer))
    return order


def _depths(sources: Sequence[Sequence[int]], sinks: Sequence[Sequence[int]]) -> list[int]:
    """The longest path to every cluster from the end where the order starts."""
    depth = [0] * len(sources)
    for cluster in _listed(sources, sinks, lambda cluster, _: cluster, len(sources)):
        depth[cluster] = max((depth[source] + 1 for source in sources[cluster]), default=0)
    return depth
