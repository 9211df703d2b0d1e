"""Clusters: the nodes of a problem as numbered columns, with all nodes that must share a stage merged into one.

     a ──▶ b ──▶ c ──▶ d        group {a, c}             {a b c} ──▶ d

Merging is lossless. The nodes of a group share a stage by definition. The nodes on a cycle of the merged precedence share a
stage, since each has a stage at most that of the next. Tensors inside a cluster cost nothing and are dropped. Tensors with
the same source and the same consumers are added.

Reachability in the precedence of clusters: a cluster counts as an ancestor and a descendant of itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import networkx as nx
import numpy as np
from numpy.typing import NDArray

from pipecompile.partitioners.problem import Problem

__all__ = [
    "Adjacency",
    "Clusters",
    "Flow",
    "adjacency",
    "coarsen",
    "head_and_tail_sums",
    "merge",
    "restricted",
    "singleton_clusters",
    "transitive_closure",
    "transitive_reduction",
]


Adjacency = tuple[list[list[int]], list[list[int]]]
"""Direct predecessors and direct successors of every cluster."""


@dataclass(frozen=True, slots=True)
class Flow:
    """A tensor between clusters. `consumers` is ascending and does not contain the source."""

    source: int
    consumers: tuple[int, ...]
    time: float
    bytes: float = 0.0


@dataclass(frozen=True, slots=True)
class Clusters:
    """Sets of nodes that share a stage, as columns, in topological order. The amounts are those of `Node`, summed.

    `arcs` are the pairs (a, b) with stage(a) <= stage(b), each once, sorted. The arcs in `strict_arcs` have
    stage(a) < stage(b). `pins` are the stages that members are pinned to: two different stages contradict each other, as
    does a strict arc (a, a). `shared` are pairs of (users, bytes).
    """

    members: tuple[tuple[str, ...], ...]
    time: tuple[float, ...]
    forward: tuple[float, ...]
    bytes: tuple[float, ...]
    activation: tuple[float, ...]
    arcs: tuple[tuple[int, int], ...]
    flows: tuple[Flow, ...]
    strict_arcs: frozenset[tuple[int, int]]
    pins: Mapping[int, frozenset[int]]
    shared: tuple[tuple[tuple[int, ...], float], ...]

    def __len__(self) -> int:
        return len(self.members)

    @property
    def is_constrained(self) -> bool:
        """Whether the user pinned nodes or set pairs apart."""
        return bool(self.pins or self.strict_arcs)

    def stage_by_node(self, assignment: Sequence[int]) -> dict[str, int]:
        """Return the stage of every node; `assignment` has the stage of every cluster."""
        return {name: int(stage) for names, stage in zip(self.members, assignment, strict=True) for name in names}

    def project(self, coarse: Clusters, assignment: Sequence[int]) -> list[int]:
        """Return the stage of every cluster of this instance; `coarse` was merged from it and has this assignment."""
        if self is coarse:
            return list(assignment)
        stage_of = coarse.stage_by_node(assignment)
        return [stage_of[names[0]] for names in self.members]


def singleton_clusters(problem: Problem) -> Clusters:
    """Return one cluster per node, in the order of the problem. Groups are ignored."""
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
        strict_arcs=strict,
        pins={index[name]: frozenset({stage}) for name, stage in problem.pins.items()},
        shared=tuple((tuple(sorted({index[name] for name in s.nodes})), s.bytes) for s in problem.shared),
    )


def coarsen(problem: Problem) -> Clusters:
    """Merge every group of the problem, and every cycle that merging closes, into one cluster."""
    clusters = singleton_clusters(problem)
    index = {names[0]: number for number, names in enumerate(clusters.members)}
    return merge(clusters, [tuple(index[name] for name in group) for group in problem.groups])


def merge(clusters: Clusters, groups: Iterable[Sequence[int]]) -> Clusters:
    """Merge groups of clusters, and the cycles that this closes. O(clusters + arcs + flows)."""
    merged_sets = _merged_sets(clusters, groups)
    new_index = {old: new for new, merged in enumerate(merged_sets) for old in merged}
    strict = frozenset((new_index[a], new_index[b]) for a, b in clusters.strict_arcs)
    arcs = {(new_index[a], new_index[b]) for a, b in clusters.arcs}
    pins: dict[int, frozenset[int]] = {}
    for old, stages in clusters.pins.items():
        pins[new_index[old]] = pins.get(new_index[old], frozenset()) | stages
    return Clusters(
        members=tuple(tuple(name for old in merged for name in clusters.members[old]) for merged in merged_sets),
        time=_sums(clusters.time, merged_sets),
        forward=_sums(clusters.forward, merged_sets),
        bytes=_sums(clusters.bytes, merged_sets),
        activation=_sums(clusters.activation, merged_sets),
        arcs=tuple(sorted((a, b) for a, b in arcs if a != b)),
        flows=_merged_flows(clusters.flows, new_index),
        strict_arcs=strict,
        pins=pins,
        shared=_merged_shared(clusters.shared, new_index),
    )


def _merged_sets(clusters: Clusters, groups: Iterable[Sequence[int]]) -> list[tuple[int, ...]]:
    """Return the sets of clusters that become one: strongly connected components, in topological order."""
    groups = [group for group in groups if len(group) > 1]
    if not groups and all(a < b for a, b in clusters.arcs):
        return [(v,) for v in range(len(clusters))]
    graph = nx.DiGraph(clusters.arcs)
    graph.add_nodes_from(range(len(clusters)))
    graph.add_edges_from((a, b) for group in groups for a, b in zip(group, (*group[1:], group[0]), strict=True))
    condensation = nx.condensation(graph)
    first = {label: min(members) for label, members in condensation.nodes(data="members")}
    order = nx.lexicographical_topological_sort(condensation, key=first.__getitem__)
    return [tuple(sorted(condensation.nodes[label]["members"])) for label in order]


def _sums(column: Sequence[float], merged_sets: Sequence[Sequence[int]]) -> tuple[float, ...]:
    return tuple(sum((column[old] for old in merged), 0.0) for merged in merged_sets)


def _merged_flows(flows: Iterable[Flow], new_index: Mapping[int, int]) -> tuple[Flow, ...]:
    total: dict[tuple[int, tuple[int, ...]], tuple[float, float]] = {}
    for flow in flows:
        source = new_index[flow.source]
        consumers = tuple(sorted({new_index[old] for old in flow.consumers} - {source}))
        if consumers and (flow.time > 0 or flow.bytes > 0):
            time, size = total.get((source, consumers), (0.0, 0.0))
            total[source, consumers] = time + flow.time, size + flow.bytes
    return tuple(Flow(source, consumers, *amounts) for (source, consumers), amounts in total.items())


def _merged_shared(
    shared: Iterable[tuple[tuple[int, ...], float]], new_index: Mapping[int, int]
) -> tuple[tuple[tuple[int, ...], float], ...]:
    total: dict[tuple[int, ...], float] = {}
    for old_users, size in shared:
        users = tuple(sorted({new_index[old] for old in old_users}))
        if size > 0:
            total[users] = total.get(users, 0.0) + size
    return tuple(total.items())


def restricted(clusters: Clusters, kept: Sequence[int]) -> Clusters:
    """Return some of the clusters, to which no arc or flow leads from others. Pins and pairs apart have no meaning there."""
    index = {old: new for new, old in enumerate(kept)}
    users = [(tuple(index[v] for v in old if v in index), size) for old, size in clusters.shared]
    return replace(
        clusters,
        members=tuple(clusters.members[v] for v in kept),
        time=tuple(clusters.time[v] for v in kept),
        forward=tuple(clusters.forward[v] for v in kept),
        bytes=tuple(clusters.bytes[v] for v in kept),
        activation=tuple(clusters.activation[v] for v in kept),
        arcs=tuple((index[a], index[b]) for a, b in clusters.arcs if a in index),
        flows=tuple(
            replace(flow, source=index[flow.source], consumers=tuple(index[v] for v in flow.consumers))
            for flow in clusters.flows
            if flow.source in index
        ),
        shared=tuple((new, size) for new, size in users if new),
    )


BLOCK = 2048
"""Columns of the closure that are held at a time: clusters * BLOCK bytes."""


def adjacency(clusters: Clusters) -> Adjacency:
    """Return the direct predecessors and the direct successors of every cluster."""
    predecessors: list[list[int]] = [[] for _ in range(len(clusters))]
    successors: list[list[int]] = [[] for _ in range(len(clusters))]
    for a, b in clusters.arcs:
        predecessors[b].append(a)
        successors[a].append(b)
    return predecessors, successors


def transitive_closure(clusters: Clusters) -> NDArray[np.bool_]:
    """Return the matrix with [a, b] true iff a is an ancestor of b. O(clusters * arcs) bytes are moved."""
    return _closure_columns(clusters, 0, len(clusters))


def head_and_tail_sums(
    clusters: Clusters, columns: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Sum `columns` (columns, clusters): [c, v] of the first result over the ancestors of v, of the second over its
    descendants.
    """
    head, tail = np.zeros(columns.shape), np.zeros(columns.shape)
    for start in range(0, len(clusters), BLOCK):
        stop = min(start + BLOCK, len(clusters))
        closure = _closure_columns(clusters, start, stop).astype(np.float64)
        head[:, start:stop] = columns @ closure
        tail += columns[:, start:stop] @ closure.T
    return head, tail


def transitive_reduction(clusters: Clusters) -> list[tuple[int, int]]:
    """Return the arcs that do not follow from other arcs; all arcs if there are more than `BLOCK` clusters."""
    if len(clusters) > BLOCK:
        return list(clusters.arcs)
    closure = transitive_closure(clusters)
    proper = closure & ~np.eye(len(clusters), dtype=bool)
    _, successors = adjacency(clusters)
    return [(a, b) for a, b in clusters.arcs if not proper[successors[a], b].any()]


def _closure_columns(clusters: Clusters, start: int, stop: int) -> NDArray[np.bool_]:
    """Return columns `start` to `stop` of the transitive closure. Clusters are in topological order."""
    closure = np.zeros((len(clusters), stop - start), dtype=bool)
    closure[np.arange(start, stop), np.arange(stop - start)] = True
    _, successors = adjacency(clusters)
    for a in reversed(range(stop)):
        for b in successors[a]:
            if b < stop:
                closure[a] |= closure[b]
    return closure
