"""User constraints on the cut: pins (a node in a given stage) and pairs apart (a node in an earlier stage than another).

pins {a: 2, d: 1}          a ──▶ b ──▶ c ──▶ d           a is in stage 2, so d is in 2 or later, yet pinned to 1

This module checks that the constraints can be met, and derives the range of stages that they leave to every cluster.
"""

from __future__ import annotations

from collections.abc import Iterator

import networkx as nx

from pipecompile.errors import InfeasibleError
from pipecompile.partitioners.clusters import Clusters, adjacency
from pipecompile.partitioners.problem import Problem
from pipecompile.text.shown_value import shown
from pipecompile.text.units import counted

__all__ = ["StageRanges", "check_constraints", "stage_ranges"]

StageRanges = tuple[list[int], list[int]]
"""The earliest and the latest stage of every cluster under precedence, pins and pairs apart. Ignores time and memory."""


def stage_ranges(clusters: Clusters, n_stages: int) -> StageRanges | None:
    """Return the stages that user constraints leave to every cluster; None if there are no constraints."""
    if not clusters.is_constrained:
        return None
    earliest = [max(clusters.pins.get(v, (0,))) for v in range(len(clusters))]
    latest = [min(clusters.pins.get(v, (n_stages - 1,))) for v in range(len(clusters))]
    for a, b in clusters.arcs:  # sorted, and clusters are in topological order
        earliest[b] = max(earliest[b], earliest[a] + ((a, b) in clusters.strict_arcs))
    for a, b in reversed(clusters.arcs):
        latest[a] = min(latest[a], latest[b] - ((a, b) in clusters.strict_arcs))
    return earliest, latest


def check_constraints(problem: Problem, clusters: Clusters, n_stages: int) -> None:
    """Raise InfeasibleError, listing every contradiction, if no cut meets the user constraints."""
    faults = [*_faults_inside_clusters(problem, clusters), *_faults_between_clusters(clusters, n_stages)]
    if faults:
        raise InfeasibleError(
            f"no cut into {counted(n_stages, 'stage')} meets the constraints",
            where="; ".join(faults),
            why="pins, pairs apart, groups and precedence contradict each other",
            hint="remove some of them"
            + (", or use more stages" if any("stages are needed" in fault for fault in faults) else ""),
        )


def _faults_inside_clusters(problem: Problem, clusters: Clusters) -> Iterator[str]:
    """Yield contradictions between nodes that share a stage."""
    cluster_of = {name: number for number, names in enumerate(clusters.members) for name in names}
    for number, stages in clusters.pins.items():
        if len(stages) > 1:
            names = [name for name in clusters.members[number] if name in problem.pins]
            pinned = " and ".join(f"{shown(name)} to {problem.pins[name]}" for name in names)
            reason = _precedence_path(problem, names[0], names[-1])
            yield f"{pinned} are pinned to different stages, yet share a stage: {reason}"
    for a, b in problem.apart:
        if cluster_of[a] == cluster_of[b]:
            reason = _precedence_path(problem, b, a)
            yield f"{shown(a)} must be in a stage before {shown(b)}, yet shares one with it: {reason}"


def _precedence_path(problem: Problem, start: str, end: str) -> str:
    """Return the path that proves stage(start) <= stage(end), or the other way round."""
    graph = nx.DiGraph([*problem.precedence, *problem.apart])
    for group in problem.groups:
        graph.add_edges_from((a, b) for a, b in zip(group, (*group[1:], *group[:1]), strict=True))
    if start not in graph or not nx.has_path(graph, start, end):
        start, end = end, start
    path = nx.shortest_path(graph, start, end)
    names = [shown(name) for name in path]
    return " -> ".join(names if len(names) <= 6 else [*names[:3], "...", *names[-2:]])


def _faults_between_clusters(clusters: Clusters, n_stages: int) -> Iterator[str]:
    """Yield one contradiction for every pin, or last stage, that predecessors push a cluster beyond."""
    earliest = [max(clusters.pins.get(v, (0,))) for v in range(len(clusters))]
    pushed_by: list[int | None] = [None] * len(clusters)
    _, successors = adjacency(clusters)
    for v, followers in enumerate(successors):
        latest = min(clusters.pins.get(v, (n_stages - 1,)))
        if earliest[v] > latest and pushed_by[v] is not None:
            yield _chain_text(clusters, pushed_by, v, earliest[v], n_stages)
            earliest[v] = latest
        for b in followers:
            if (pushed := earliest[v] + ((v, b) in clusters.strict_arcs)) > earliest[b]:
                earliest[b], pushed_by[b] = pushed, v


def _chain_text(clusters: Clusters, pushed_by: list[int | None], end: int, stage: int, n_stages: int) -> str:
    """Describe the chain of clusters that pushes `end` into `stage`."""
    path, here = [end], pushed_by[end]
    while here is not None:
        path.append(here)
        here = None if here in clusters.pins else pushed_by[here]
    path.reverse()
    first, last = (shown(clusters.members[cluster][0]) for cluster in (path[0], end))
    chain = first
    for a, b in zip(path, path[1:], strict=False):
        chain += (" <" if (a, b) in clusters.strict_arcs else " ->") + f" {shown(clusters.members[b][0])}"
    start = f"{first} is pinned to stage {max(clusters.pins[path[0]])}" if path[0] in clusters.pins else ""
    if end in clusters.pins:
        wrong = f"{last} is pinned to stage {min(clusters.pins[end])}, expected {stage} or later"
        return f"{start}{' and ' * bool(start)}{wrong}: {chain}"
    return f"{start}{': ' * bool(start)}{chain}: {stage + 1} stages are needed, n_stages is {n_stages}"
