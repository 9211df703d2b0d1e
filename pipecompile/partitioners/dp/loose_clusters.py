"""Loose clusters: little components of the graph, such as the counter of a batch normalization, that nothing else depends on.

    a ─▶ b ─▶ c ─▶ d        counter        counter        each could be on any stage: each doubles the down-sets

They are set aside, and fill the time that the stages of the others leave.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import networkx as nx

from pipecompile.partitioners.clusters import Clusters, restricted
from pipecompile.partitioners.machine import Machine
from pipecompile.partitioners.objective import LoadTracker

__all__ = ["LooseClusters", "set_aside"]


@dataclass(frozen=True, slots=True)
class LooseClusters:
    """The clusters that are left, as numbers before and as clusters of their own, and the components that are set aside, by number.

    `work` has the seconds of all components at speed 1.
    """

    kept: tuple[int, ...]
    rest: Clusters
    components: tuple[tuple[int, ...], ...]
    work: float

    def place(self, clusters: Clusters, machine: Machine, assignment: Sequence[int]) -> list[int]:
        """Return the stage of every cluster, where those left have the given stages and each component is on the stage with the least load
        when its turn comes, from the largest to the smallest. Requires a device per stage.
        """
        stage_of = [0] * len(clusters)
        for cluster, stage in zip(self.kept, assignment, strict=True):
            stage_of[cluster] = stage
        if not self.components:
            return stage_of
        tracker = LoadTracker(clusters, machine, stage_of)
        loads = [tracker.load(s) for s in range(len(machine))]
        sizes = [sum(clusters.time[v] for v in component) / machine.speed[0] for component in self.components]
        loads[0] -= sum(sizes)
        for number in sorted(range(len(sizes)), key=lambda number: -sizes[number]):
            best = min(range(len(loads)), key=loads.__getitem__)
            loads[best] += sizes[number]
            for cluster in self.components[number]:
                stage_of[cluster] = best
        return stage_of


def set_aside(clusters: Clusters, most: float) -> LooseClusters:
    """Return the clusters without the components of at most `most` seconds; the component with the most work is kept."""
    graph = nx.Graph(clusters.arcs)
    graph.add_nodes_from(range(len(clusters)))
    graph.add_edges_from((flow.source, consumer) for flow in clusters.flows for consumer in flow.consumers)
    found = [tuple(sorted(component)) for component in nx.connected_components(graph)]
    work = [sum(clusters.time[v] for v in component) for component in found]
    main = max(range(len(found)), key=work.__getitem__)
    small = [number for number, seconds in enumerate(work) if seconds <= most and number != main]
    loose = tuple(found[number] for number in small)
    kept = sorted(set(range(len(clusters))).difference(*loose))
    rest = restricted(clusters, kept) if loose else clusters
    return LooseClusters(tuple(kept), rest, loose, sum(work[number] for number in small))
