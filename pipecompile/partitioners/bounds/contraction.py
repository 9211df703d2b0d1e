"""Contraction: merge clusters that no cut below a target separates. It keeps the integer program small.

     u ══ 40 ══▶ v        target 70: apart, the stage of u would take 35 + 40, so u and v share a stage.
    35          10

If u and v are in different stages, the stage of u computes u and moves every tensor between the two. If that alone reaches
the target for u or for v, every better cut keeps them together. Merged clusters are heavier, so this repeats until a
fixed point.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from pipecompile.partitioners.clusters import Clusters, merge
from pipecompile.partitioners.machine import Machine

__all__ = ["contract"]


def contract(clusters: Clusters, machine: Machine, target: float) -> Clusters:
    """Return merged clusters with the same set of cuts below the target."""
    while pairs := list(_inseparable_pairs(clusters, machine, target)):
        clusters = merge(clusters, pairs)
    return clusters


def _inseparable_pairs(clusters: Clusters, machine: Machine, target: float) -> Iterator[tuple[int, int]]:
    sent: defaultdict[tuple[int, int], float] = defaultdict(float)  # seconds from the first to the second, if apart
    link_factor = machine.min_link_factor
    for flow in clusters.flows if link_factor else ():
        for consumer in flow.consumers:
            sent[flow.source, consumer] += flow.time * link_factor
    max_speed = max(machine.speed)
    for a, b in {(min(pair), max(pair)) for pair in sent}:
        forth, back = sent.get((a, b), 0.0), sent.get((b, a), 0.0)
        work = max(clusters.time[a], clusters.time[b]) / max_speed
        if (max(work, forth, back) if machine.overlap else work + forth + back) >= target:
            yield a, b
