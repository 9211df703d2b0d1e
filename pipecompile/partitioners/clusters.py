"""The problem with names turned into numbers and everything that must share a stage melted together.

     a ──▶ b ──▶ c ──▶ d        group {a, c}             {a b c} ──▶ d

Merging is lossless: a group shares a stage by definition; nodes on a cycle of the merged precedence are bounded by each
other from both sides. Tensors inside a cluster cost nothing and go; tensors of one source to the same clusters are added.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import networkx as nx

from pipecompile.errors import InputError
from pipecompile.partitioners.problem import Problem

__all__ = ["Clusters", "Flow", "Stages", "clusters_of", "coarsen", "merge"]


@dataclass(frozen=True, slots=True)
class Flow:
    """A tensor between clusters. `consumers` is ascending and does not hold the source."""

    source: int
    consumers: tuple[int, ...]
    time: float


@dataclass(frozen=True, slots=True)
class Clusters:
    """Nodes that move together, as columns; `arcs` are pairs (a, b) with stage(a) <= stage(b), each once."""

    members: tuple[tuple[str, ...], ...]
    time: tuple[float, ...]
    bytes: tuple[float, ...]
    activation: tuple[float, ...]
    arcs: tuple[tuple[int, int], ...]
    flows: tuple[Flow, ...]

    def __len__(self) -> int:
        return len(self.members)

    def stage_of(self, stages: Sequence[int]) -> dict[str, int]:
        """The stage of every node, given the stage of every cluster."""
        return {name: int(stage) for names, stage in zip(self.members, stages, strict=True) for name in names}

    def adopted(self, merged: Clusters, stages: Sequence[int]) -> list[int]:
        """The stage of every cluster here, given those of clusters that were merged from these."""
        by_name = merged.stage_of(stages)
        return [by_name[names[0]] for names in self.members]


@dataclass(frozen=True, slots=True)
class Stages:
    """What the stages can do: one entry per stage, and the two switches of the objective."""

    speed: tuple[float, ...]
    limit: tuple[float, ...]
    in_flight: tuple[float, ...]
    multicast: bool
    overlap: bool

    def __len__(self) -> int:
        return len(self.speed)

    @classmethod
    def of(cls, problem: Problem, n_stages: int) -> Stages:
        """Spread the problem's numbers over the stages. Raises InputError when a list has another length."""
        for field in ("memory_limit", "in_flight", "speed"):
            values = getattr(problem, field)
            if isinstance(values, tuple) and len(values) != n_stages:
                raise InputError(f"n_stages is {n_stages}, but {field} lists {len(values)} stages",
                                 where=f"problem {problem.name!r}" if problem.name else "", hint=f"n_stages={len(values)}")  # fmt: skip
        limit = float("inf") if problem.memory_limit is None else problem.memory_limit
        limits = limit if isinstance(limit, tuple) else (limit,) * n_stages
        ones = (1.0,) * n_stages
        return cls(problem.speed or ones, limits, problem.in_flight or ones, problem.multicast, problem.overlap)


def clusters_of(problem: Problem) -> Clusters:
    """Every node a cluster of its own; groups are not looked at."""
    index = {node.name: number for number, node in enumerate(problem.nodes)}
    return Clusters(
        members=tuple((node.name,) for node in problem.nodes),
        time=tuple(node.time for node in problem.nodes),
        bytes=tuple(node.bytes for node in problem.nodes),
        activation=tuple(node.activation for node in problem.nodes),
        arcs=tuple(sorted({(index[a], index[b]) for a, b in problem.precedence if a != b})),
        flows=tuple(
            Flow(index[t.source], tuple(sorted(index[c] for c in t.consumers)), t.time) for t in problem.tensors
        ),
    )


def coarsen(problem: Problem) -> Clusters:
    """Melt every group, and every cycle that this makes, into one cluster."""
    clusters = clusters_of(problem)
    index = {names[0]: number for number, names in enumerate(clusters.members)}
    return merge(clusters, [tuple(index[name] for name in group) for group in problem.groups])


def merge(clusters: Clusters, groups: Iterable[Sequence[int]]) -> Clusters:
    """Melt groups of clusters, and the cycles this makes. Result in topological order; O(clusters + arcs + flows)."""
    graph = nx.DiGraph(clusters.arcs)
    graph.add_nodes_from(range(len(clusters)))
    graph.add_edges_from(
        (a, b) for group in groups for a, b in zip(group, (*group[1:], group[0]) if group else (), strict=True)
    )
    whole = nx.condensation(graph)
    parts = [tuple(sorted(whole.nodes[label]["members"])) for label in nx.lexicographical_topological_sort(
        whole, key=lambda label: min(whole.nodes[label]["members"]))]  # fmt: skip
    part_of = {old: new for new, part in enumerate(parts) for old in part}
    arcs = {(part_of[a], part_of[b]) for a, b in clusters.arcs}
    return Clusters(
        members=tuple(tuple(name for old in part for name in clusters.members[old]) for part in parts),
        time=_summed(clusters.time, parts),
        bytes=_summed(clusters.bytes, parts),
        activation=_summed(clusters.activation, parts),
        arcs=tuple(sorted((a, b) for a, b in arcs if a != b)),
        flows=_merged_flows(clusters.flows, part_of),
    )


def _summed(column: Sequence[float], parts: Sequence[Sequence[int]]) -> tuple[float, ...]:
    return tuple(sum((column[old] for old in part), 0.0) for part in parts)


def _merged_flows(flows: Iterable[Flow], part_of: dict[int, int]) -> tuple[Flow, ...]:
    total: dict[tuple[int, tuple[int, ...]], float] = {}
    for flow in flows:
        source = part_of[flow.source]
        consumers = tuple(sorted({part_of[old] for old in flow.consumers} - {source}))
        if consumers and flow.time > 0:
            total[source, consumers] = total.get((source, consumers), 0.0) + flow.time
    return tuple(Flow(source, consumers, time) for (source, consumers), time in total.items())
