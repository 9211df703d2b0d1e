"""What the user forces on the cut: pins and pairs apart. Whether it can be met at all, and what it costs.

pins {a: 2, d: 1}          a ──▶ b ──▶ c ──▶ d           a is in stage 2, so d is in 2 or later, yet pinned to 1
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import networkx as nx

from pipecompile.errors import InfeasibleError
from pipecompile.partitioners.bounds.reachability import neighbours
from pipecompile.partitioners.clusters import Clusters
from pipecompile.partitioners.problem import Problem

__all__ = ["Price", "Span", "check_steering", "span_of", "unsteered"]

Span = tuple[list[int], list[int]]
"""The first and the last stage that steering and precedence leave to every cluster, memory and time apart."""


@dataclass(frozen=True, slots=True)
class Price:
    """What steering costs: the bottleneck with it, the one found without, and what no cut without it can be below."""

    forced: float
    free: float
    lower_bound: float

    @property
    def share(self) -> float:
        """By how much steering makes the slowest stage slower, as a fraction; at least 0."""
        return max(self.forced / self.free - 1.0, 0.0) if self.free else 0.0


def unsteered(problem: Problem) -> Problem:
    """The same without pins and pairs apart."""
    return replace(problem, pins={}, apart=())


def span_of(clusters: Clusters, n_stages: int) -> Span | None:
    """None when nothing is steered."""
    if not clusters.pins and not clusters.strict:
        return None
    first = [max(clusters.pins.get(v, (0,))) for v in range(len(clusters))]
    last = [min(clusters.pins.get(v, (n_stages - 1,))) for v in range(len(clusters))]
    for a, b in clusters.arcs:  # sorted, and clusters are in topological order
        first[b] = max(first[b], first[a] + ((a, b) in clusters.strict))
    for a, b in reversed(clusters.arcs):
        last[a] = min(last[a], last[b] - ((a, b) in clusters.strict))
    return first, last


def check_steering(problem: Problem, clusters: Clusters, n_stages: int) -> None:
    """Raise InfeasibleError with every contradiction: a cut that is asked for, yet cannot be."""
    faults = [*_inside(problem, clusters), *_between(clusters, n_stages)]
    if faults:
        raise InfeasibleError(
            f"no cut into {n_stages} stages does what is asked for",
            where="; ".join(faults),
            why="pins, pairs apart, groups and precedence contradict each other",
            hint="fewer of them"
            + (", or more stages" if any("stages are needed" in fault for fault in faults) else ""),
        )


def _inside(problem: Problem, clusters: Clusters) -> Iterator[str]:
    """Contradictions between nodes that share a stage."""
    home = {name: number for number, names in enumerate(clusters.members) for name in names}
    for number, stages in clusters.pins.items():
        if len(stages) > 1:
            names = [name for name in clusters.members[number] if name in problem.pins]
            pinned = " and ".join(f"{name!r} to {problem.pins[name]}" for name in names)
            yield f"{pinned} are pinned apart, yet share a stage: {_tie(problem, names[0], names[-1])}"
    for a, b in problem.apart:
        if home[a] == home[b]:
            yield f"{a!r} must be in a stage before {b!r}, yet shares one with it: {_tie(problem, b, a)}"


def _tie(problem: Problem, start: str, end: str) -> str:
    """Why stage(start) <= stage(end)."""
    graph = nx.DiGraph([*problem.precedence, *problem.apart])
    for group in problem.groups:
        graph.add_edges_from((a, b) for a, b in zip(group, (*group[1:], *group[:1]), strict=True))
    if start not in graph or not nx.has_path(graph, start, end):
        start, end = end, start
    path = nx.shortest_path(graph, start, end)
    shown = path if len(path) <= 6 else [*path[:3], "...", *path[-2:]]
    return " -> ".join(map(repr, shown)).replace("'...'", "...")


def _between(clusters: Clusters, n_stages: int) -> Iterator[str]:
    """Contradictions between clusters: one for every pin, or end, that what comes before pushes beyond it."""
    first = [max(clusters.pins.get(v, (0,))) for v in range(len(clusters))]
    cause: list[int | None] = [None] * len(clusters)
    _, after = neighbours(clusters)
    for v, followers in enumerate(after):
        most = min(clusters.pins.get(v, (n_stages - 1,)))
        if first[v] > most and cause[v] is not None:
            yield _chain(clusters, cause, v, first[v], n_stages)
            first[v] = most
        for b in followers:
            if (pushed := first[v] + ((v, b) in clusters.strict)) > first[b]:
                first[b], cause[b] = pushed, v


def _chain(clusters: Clusters, cause: list[int | None], end: int, stage: int, n_stages: int) -> str:
    """The clusters that push `end` into `stage`, as a sentence."""
    path, here = [end], cause[end]
    while here is not None:
        path.append(here)
        here = None if here in clusters.pins else cause[here]
    path.reverse()
    text = repr(clusters.members[path[0]][0])
    if path[0] in clusters.pins:
        text += f" is pinned to stage {max(clusters.pins[path[0]])},"
    for a, b in zip(path, path[1:], strict=False):
        text += (" <" if (a, b) in clusters.strict else " ->") + f" {clusters.members[b][0]!r}"
    if end in clusters.pins:
        return text + f" is pinned to stage {min(clusters.pins[end])}, expected {stage} or later"
    return text + f": {stage + 1} stages are needed, n_stages is {n_stages}"
