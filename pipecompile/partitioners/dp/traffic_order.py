"""The order of clusters after which little crosses: wherever it is cut, the seconds of tensors between the two sides are few.

  placed          ready: the least growth is next                growth of v = + tensors that v opens (none of their ends is placed)
a ──▶ b ──┬──▶ c   + 5 - 2                                                  - tensors that v closes (all other ends are placed)
          ╰──▶ d   + 1
"""

from __future__ import annotations

from heapq import heappop, heappush

from pipecompile.partitioners.clusters import Clusters, adjacency

__all__ = ["least_traffic_order"]


def least_traffic_order(clusters: Clusters, *, forward: bool) -> list[int]:
    """Return the order that places next the ready cluster after which the least seconds of tensors cross to clusters that are not
    placed yet; of equals, the one that became ready last.

    Each tensor asks its ends for their growth anew at most twice: O(arcs + sum of (ends of a flow)^2), times a logarithm.
    """
    predecessors, successors = adjacency(clusters)
    sources, sinks = (predecessors, successors) if forward else (successors, predecessors)
    ready, order = _ReadyClusters(clusters), list[int]()
    missing = [len(before) for before in sources]
    for v in range(len(clusters)):
        if not missing[v]:
            ready.add(v)
    while (placed := ready.pop()) is not None:
        order.append(placed)
        for w in sinks[placed]:
            missing[w] -= 1
            if not missing[w]:
                ready.add(w)
    return order[:: 1 if forward else -1]


class _ReadyClusters:
    """The clusters that can be placed, by growth. The heap holds every growth that a cluster has had; only the last is valid."""

    def __init__(self, clusters: Clusters) -> None:
        self._flows = [(flow.time, (flow.source, *flow.consumers)) for flow in clusters.flows if flow.time]
        self._open = [len(ends) for _, ends in self._flows]
        self._flows_of: list[list[int]] = [[] for _ in range(len(clusters))]
        for number, (_, ends) in enumerate(self._flows):
            for v in ends:
                self._flows_of[v].append(number)
        self._heap, self._valid = list[tuple[float, int, int]](), dict[int, tuple[float, int, int]]()
        self._n_added = 0

    def add(self, v: int) -> None:
        """Add a cluster; of equals, the one that is added last comes out first."""
        self._n_added += 1
        self._push(v, -self._n_added)

    def pop(self) -> int | None:
        """Place the cluster of least growth and return it; None if no cluster is ready."""
        while self._heap:
            entry = heappop(self._heap)
            v = entry[2]
            if self._valid.get(v) == entry:
                del self._valid[v]
                self._place(v)
                return v
        return None

    def _push(self, v: int, rank: int) -> None:
        self._valid[v] = (self._growth(v), rank, v)
        heappush(self._heap, self._valid[v])

    def _growth(self, v: int) -> float:
        growth = 0.0
        for number in self._flows_of[v]:
            time, ends = self._flows[number]
            growth += time * ((self._open[number] == len(ends)) - (self._open[number] == 1))
        return growth

    def _place(self, v: int) -> None:
        changed = set[int]()
        for number in self._flows_of[v]:
            ends = self._flows[number][1]
            self._open[number] -= 1
            if self._open[number] in (1, len(ends) - 1):
                changed.update(w for w in ends if w in self._valid)
        for w in changed:
            self._push(w, self._valid[w][1])
