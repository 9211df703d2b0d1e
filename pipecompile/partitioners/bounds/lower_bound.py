"""Lower bounds of the bottleneck that need no solver."""

from __future__ import annotations

from math import fsum

from pipecompile.partitioners.clusters import Clusters
from pipecompile.partitioners.machine import Stages

__all__ = ["lower_bound"]


def lower_bound(clusters: Clusters, stages: Stages) -> float:
    """The larger of two: all work shared evenly, and the heaviest cluster on the fastest device. O(clusters)."""
    used = [stages.speed[d] for d in set(stages.device)]
    even = fsum(clusters.time) / fsum(used)
    return max(even, max(clusters.time, default=0.0) / max(used)) * (1 - 1e-12)
