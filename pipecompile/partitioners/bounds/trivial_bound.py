"""The trivial lower bounds of the bottleneck: average load and largest cluster."""

from __future__ import annotations

from math import fsum

from pipecompile.partitioners.clusters import Clusters
from pipecompile.partitioners.machine import Machine

__all__ = ["trivial_lower_bound"]


def trivial_lower_bound(clusters: Clusters, machine: Machine) -> float:
    """Return the larger of two bounds: total work over total speed, largest cluster over largest speed. O(clusters)."""
    speeds = [machine.speed[d] for d in set(machine.device_of)]
    average = fsum(clusters.time) / fsum(speeds)
    return max(average, max(clusters.time, default=0.0) / max(speeds)) * (1 - 1e-12)
