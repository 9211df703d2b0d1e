"""Seconds of the collectives of a layout, by rings.

    group in a node           n - 1 rounds of bytes / n over the link inside
    group over nodes          a ring with k members in a node crosses with the adapters of all k

Reduce-scatter and all-gather take (n - 1) / n of the bytes, an all-reduce both (Patarasuk and Yuan, "Bandwidth optimal all-reduce
algorithms for clusters of workstations", 2009).
"""

from __future__ import annotations

from dataclasses import dataclass

from pipecompile.layouts.enumeration import Layout
from pipecompile.layouts.hardware import Cluster

__all__ = ["Ring", "pair_bandwidths", "ring_along"]


@dataclass(frozen=True, slots=True)
class Ring:
    """`size` members, each sending `bandwidth` bytes per second to the next, with `latency` seconds a round."""

    size: int
    bandwidth: float
    latency: float

    def half(self, nbytes: float) -> float:
        """Return the seconds of a reduce-scatter or an all-gather of `nbytes` bytes, the size of the whole."""
        if self.size == 1 or not nbytes:
            return 0.0
        return (self.size - 1) * (nbytes / self.size / self.bandwidth + self.latency)

    def all_reduce(self, nbytes: float) -> float:
        """Return the seconds of an all-reduce of `nbytes` bytes."""
        return 2 * self.half(nbytes)


def ring_along(cluster: Cluster, layout: Layout, name: str) -> Ring:
    """Return the ring of a group along a dimension of the layout's mesh."""
    size, latency = layout.mesh.get(name, 1), cluster.spec.link_latency
    if size == 1:
        return Ring(1, cluster.inside, latency)
    in_node = max(1, min(size, cluster.devices_per_node // layout.stride(name)))
    if in_node == size:
        return Ring(size, cluster.inside, latency)
    return Ring(size, min(cluster.inside, in_node * cluster.between), latency)


def pair_bandwidths(cluster: Cluster, layout: Layout) -> float | dict[tuple[int, int], float]:
    """Return the bytes per second between devices of a pipeline: one number if all pairs are in a node, else one per pair."""
    node_of = [p * layout.stride("pp") // cluster.devices_per_node for p in range(layout.pp)]
    if len(set(node_of)) == 1:
        return cluster.inside
    return {
        (a, b): cluster.inside if node_of[a] == node_of[b] else cluster.between
        for a in range(layout.pp)
        for b in range(layout.pp)
        if a != b
    }
