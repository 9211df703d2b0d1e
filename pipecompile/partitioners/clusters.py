"""The nodes of a problem with names turned into numbers, and everything that must share a stage melted together.

     a ──▶ b ──▶ c ──▶ d        group {a, c}             {a b c} ──▶ d

Merging is lossless: a group shares a stage by definition; nodes on a cycle of the merged precedence are bounded by each
other from both sides. Tensors inside a cluster cost nothing and go; tensors of one source to the same clusters are added.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import networkx as nx

from pipecompile.partitioners.problem import Problem

__all__ = ["Clusters", "Flow", "clusters_of", "coarsen", "merge"]


@dataclass(frozen=True, slots=True)
class Flow:
    """A tensor between clusters. `consumers` is ascending and does not hold the source."""

    source: int
    consumers: tuple[int, ...]
    time: float
    bytes: float = 0.0


@dataclass(frozen=True, slots=True)
class Clusters:
    """Nodes that move together, as columns, in topological order.

    `arcs` are pairs (a, b) with stage(a) <= stage(b), each once, sorted; those in `strict` have stage(a) < stage(b). `pins`
    are the stages that members are pinned to. More than one of them, or a strict pair (a, a), cannot be met.
    """

    members: tuple[tuple[str, ...], ...]
    time: tuple[float, ...]
    forward: tuple[float, ...]
    bytes: tuple[float, ...]
    activation: tuple[float, ...]
    arcs: tuple[tuple[int, int], ...]
    flows: tuple[Flow, ...]
    strict: frozenset[tuple[int, int]]
    pins: Mapping[int, frozenset[int]]
    shared: tuple[tuple[tuple[int, ...], float], ...]

    def __len__(self) -> int:
        return len(self.members)

    def stage_of(self, stages: Sequence[int]) -> dict[str, int]:
        """The stage of every node, given the stage of every cluster."""
        return {name: int(stage) for names, stage in zip(self.members, stages, strict=True) for name in names}

    def adopted(self, merged: Clusters, stages: Sequence[int]) -> list[int]:
        """The stage of every cluster here, given those of clusters that were merged from these."""
        if self is merged:
            return list(stages)
        by_name = merged.stage_of(stages)
        return [by_name[names[0]] for names in self.members]


def clusters_of(problem: Problem) -> Clusters:
    """Every node a cluster of its own, in the order of the problem; groups are not looked at."""
    index = {node.name: number for number, node in enumerate(problem.nodes)}
    strict = frozenset((index[a], index[b]) for a, b in problem.apart)
    return Clusters(
        members=tuple((node.name,) for node in problem.nodes),
        time=tuple(node.time for node in problem.nodes),
        forward=tuple(node.forward for node in problem.nodes),
        bytes=tuple(node.bytes for node in problem.nodes),
        activation=tuple(node.activation for node in problem.nodes),
        arcs=tuple(sorted({(index[a], index[b]) for a, b in problem.precedence if a != b} | strict)),
        flows=tuple(
            Flow(index[t.source], tuple(sorted(index[c] for c in t.consumers)), t.time, t.bytes)
            for t in problem.tensors
        ),
        strict=strict,
        pins={index[name]: frozenset({stage}) for name, stage in problem.pins.items()},
        shared=tuple((tuple(sorted({index[name] for name in s.nodes})), s.bytes) for s in problem.shared),
    )


def coarsen(problem: Problem) -> Clusters:
    """Melt every group, and every cycle that this makes, into one cluster."""
    clusters = clusters_of(problem)
    index = {names[0]: number for number, names in enumerate(clusters.members)}
    return merge(clusters, [tuple(index[name] for name in group) for group in problem.groups])


def merge(clusters: Clusters, groups: Iterable[Sequence[int]]) -> Clusters:
    """Melt groups of clusters, and the cycles this makes. Result in topological order; O(clusters + arcs + flows)."""
    parts = _parts(clusters, groups)
    part_of = {old: new for new, part in enumerate(parts) for old in part}
    strict = frozenset((part_of[a], part_of[b]) for a, b in clusters.strict)
    arcs = {(part_of[a], part_of[b]) for a, b in clusters.arcs}
    pins: dict[int, frozenset[int]] = {}
    for old, stages in clusters.pins.items():
        pins[part_of[old]] = pins.get(part_of[old], frozenset()) | stages
    return Clusters(
        members=tuple(tuple(name for old in part for name in clusters.members[old]) for part in parts),
        time=_summed(clusters.time, parts),
        forward=_summed(clusters.forward, parts),
        bytes=_summed(clusters.bytes, parts),
        activation=_summed(clusters.activation, parts),
        arcs=tuple(sorted((a, b) for a, b in arcs if a != b)),
        flows=_merged_flows(clusters.flows, part_of),
        strict=strict,
        pins=pins,
        shared=_merged_shared(clusters.shared, part_of),
    )


def _parts(clusters: Clusters, groups: Iterable[Sequence[int]]) -> list[tuple[int, ...]]:
    """What is melted into one, in topological order."""
    groups = [group for group in groups if len(group) > 1]
    if not groups and all(a < b for a, b in clusters.arcs):
        return [(v,) for v in range(len(clusters))]
    graph = nx.DiGraph(clusters.arcs)
    graph.add_nodes_from(range(len(clusters)))
    graph.add_edges_from((a, b) for group in groups for a, b in zip(group, (*group[1:], group[0]), strict=True))
    whole = nx.condensation(graph)
    first = {label: min(members) for label, members in whole.nodes(data="members")}
    order = nx.lexicographical_topological_sort(whole, key=first.__getitem__)
    return [tuple(sorted(whole.nodes[label]["members"])) for label in order]


def _summed(column: Sequence[float], parts: Sequence[Sequence[int]]) -> tuple[float, ...]:
    return tuple(sum((column[old] for old in part), 0.0) for part in parts)


def _merged_flows(flows: Iterable[Flow], part_of: Mapping[int, int]) -> tuple[Flow, ...]:
    total: dict[tuple[int, tuple[int, ...]], tuple[float, float]] = {}
    for flow in flows:
        source = part_of[flow.source]
        consumers = tuple(sorted({part_of[old] for old in flow.consumers} - {source}))
        if consumers and (flow.time > 0 or flow.bytes > 0):
            time, held = total.get((source, consumers), (0.0, 0.0))
            total[source, consumers] = time + flow.time, held + flow.bytes
    return tuple(Flow(source, consumers, *amounts) for (source, consumers), amounts in total.items())


def _merged_shared(
    shared: Iterable[tuple[tuple[int, ...], float]], part_of: Mapping[int, int]
) -> tuple[tuple[tuple[int, ...], float], ...]:
    total: dict[tuple[int, ...], float] = {}
    for users, held in shared:
        where = tuple(sorted({part_of[old] for old in users}))
        if held > 0:
            total[where] = total.get(where, 0.0) + held
    return tuple(total.items())
