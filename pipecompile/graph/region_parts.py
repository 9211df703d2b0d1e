"""Regions of the user's own checkpointing that a cut divides: each stage recomputes its part.

    region            stage 0     stage 1
    a  b | c  d       [a  b]      [c  d]        the whole region would run all of a and b again, if c or d save anything

Without reentrant autograd, a recomputation stops after the last tensor that the region saved. A region inside saves its inputs in the
region around, at its begin, or at its end if it is reentrant.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterable, Sequence
from dataclasses import replace

import networkx as nx
from torch import fx

from pipecompile.tracing.node_facts import facts
from pipecompile.tracing.recomputed_region import RecomputedRegion
from pipecompile.tracing.traced_graph import TracedGraph
from pipecompile.tracing.user_source import line_of

__all__ = ["RegionParts", "rewritten_state", "tie_lone_writes"]


def rewritten_state(graph: TracedGraph, deferred: Container[fx.Node]) -> list[str]:
    """Return the lines of nodes in regions that write tensors of the model, each once; those in `deferred` do not count."""
    nodes = [node for node in graph.graph.nodes if facts(node).region and node not in deferred]
    owned = {key for node in graph.graph.nodes if node.op == "get_attr" for key in facts(node).storages}
    owned |= {key for node in nodes for key in facts(node).reads}
    return list(dict.fromkeys(line_of(facts(node).source) for node in nodes if facts(node).mutates & owned))


def tie_lone_writes(nodes: Iterable[fx.Node], ties: nx.Graph[str]) -> None:
    """Tie each node in a region that writes the model and needs no other node, such as `num_batches_tracked.add_(1)`, to the next other
    node of the region, or the last one before it: in a stage with no other node of the region, no recomputation would run the write again.
    """
    regions = defaultdict[RecomputedRegion, list[fx.Node]](list)
    for node in nodes:
        if region := facts(node).region:
            regions[region].append(node)
    for inside in regions.values():
        others = [node for node in inside if not _is_lone_write(node)]
        for place, node in enumerate(inside):
            if others and _is_lone_write(node):
                near = next((one for one in inside[place:] if not _is_lone_write(one)), others[-1])
                ties.add_edge(node.name, near.name, why=f"{node.name} writes the model, and runs again with its region")


def _is_lone_write(node: fx.Node) -> bool:
    return bool(facts(node).mutates) and all(source.op == "get_attr" for source in node.all_input_nodes)


class RegionParts:
    """The parts of regions in a stage with the nodes `own`; `nodes` are those of the whole graph, in order."""

    def __init__(self, nodes: Iterable[fx.Node], own: Sequence[fx.Node]) -> None:
        self._own = set(own)
        self._members: dict[RecomputedRegion, list[fx.Node]] = {}
        self._last: dict[RecomputedRegion, fx.Node] = {}  # at which the region itself may save
        self._parts: dict[RecomputedRegion, RecomputedRegion] = {}
        for node in nodes:
            if region := facts(node).region:
                self._add(node, region.path)

    def _add(self, node: fx.Node, path: Sequence[RecomputedRegion]) -> None:
        for region, inner in zip(path, (*path[1:], None), strict=True):
            if inner is None or inner not in self._members or inner.is_reentrant:
                self._last[region] = node
        for region in path:
            self._members.setdefault(region, []).append(node)

    def part(self, region: RecomputedRegion) -> RecomputedRegion:
        """Return the part of a region that has nodes in the stage."""
        if region not in self._parts:
            parent = self.part(region.parent) if region.parent else None
            is_whole = self._continues(region) or any(map(self._is_divided, self._reentrant_inside(region)))
            self._parts[region] = replace(
                region, parent=parent, is_divided=self._is_divided(region), runs_to_end=is_whole
            )
        return self._parts[region]

    def _is_divided(self, region: RecomputedRegion) -> bool:
        return not self._own.issuperset(self._members[region])

    def _continues(self, region: RecomputedRegion) -> bool:
        """Return whether the region may save after its last node in the stage."""
        members = self._members[region]
        return members.index(self._last[region]) > max(place for place, node in enumerate(members) if node in self._own)

    def _reentrant_inside(self, region: RecomputedRegion) -> set[RecomputedRegion]:
        """Return the reentrant regions directly inside a region that have nodes in the stage."""
        return {
            inner
            for inner, members in self._members.items()
            if inner.parent is region and inner.is_reentrant and not self._own.isdisjoint(members)
        }
