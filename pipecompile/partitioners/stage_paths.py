"""Paths of stages: make stages independent of each other where possible, at the same bottleneck, so that they run in parallel.

    tower 0 ─► tower 1 + sum ─► head          the sum of two towers is in the stage of the second, which waits for the first
    tower 0 ─► head + sum ◄─ tower 1          at the same bottleneck: the longest path has two stages instead of three

The stages are a DAG. A step fills and drains along its longest path, so that path should be short. A move takes the clusters of a
stage that wait for another stage, and what depends on them, to a later stage; or those that another stage waits for, and what
these depend on, to an earlier one. Moves that raise the bottleneck are not made.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from operator import le
from time import monotonic

import numpy as np
from numpy.typing import NDArray

from pipecompile.partitioners.clusters import Adjacency, Clusters, adjacency
from pipecompile.partitioners.constraints import StageRanges
from pipecompile.partitioners.machine import Machine
from pipecompile.partitioners.objective import LoadTracker

__all__ = ["carry", "cut_arcs", "is_legal", "path_moves", "shorten_paths", "stage_edges"]

_SLACK = 1 + 1e-9
"""Factor by which the bottleneck may grow: rounding."""

_MAX_MOVES = 400
"""Moves that are evaluated, each in O(clusters + arcs + flows)."""

Score = tuple[float, float]
"""(seconds of the longest path, sum over the stages of the longest path through each), compared lexicographically."""


def stage_edges(clusters: Clusters, assignment: Sequence[int]) -> set[tuple[int, int]]:
    """Return the pairs of different stages (a, b) such that a cluster of b depends directly on a cluster of a."""
    return {(assignment[a], assignment[b]) for a, b in cut_arcs(clusters, assignment)}


def cut_arcs(clusters: Clusters, assignment: Sequence[int]) -> list[tuple[int, int]]:
    """Return the arcs between clusters of different stages."""
    return [arc for arc in clusters.arcs if assignment[arc[0]] != assignment[arc[1]]]


def shorten_paths(
    clusters: Clusters, machine: Machine, assignment: Sequence[int], ranges: StageRanges | None, deadline: float
) -> list[int]:
    """Return a cut with the same bottleneck and, if moves find one, a shorter longest path of stages. Requires a device per stage."""
    best = list(assignment)
    if len(machine) < 3 or not machine.is_one_to_one:
        return best
    limit, score = _evaluate(clusters, machine, best)
    graph, tried, improved = adjacency(clusters), 0, True
    while improved:
        improved = False
        for candidate in path_moves(clusters, len(machine), best, ranges, graph):
            tried += 1
            if tried > _MAX_MOVES or monotonic() > deadline:
                return best
            bottleneck, value = _evaluate(clusters, machine, candidate)
            if bottleneck <= limit * _SLACK and _is_shorter(value, score):
                best, score, improved = candidate, value, True
                break
    return best


def _is_shorter(value: Score, score: Score) -> bool:
    return value[0] * _SLACK < score[0] or (value[0] <= score[0] * _SLACK and value[1] * _SLACK < score[1])


def _evaluate(clusters: Clusters, machine: Machine, assignment: Sequence[int]) -> tuple[float, Score]:
    """Return the bottleneck in seconds, and the score of the paths."""
    tracker = LoadTracker(clusters, machine, assignment)
    loads = [tracker.load(stage) for stage in range(len(machine))]
    edges = sorted(stage_edges(clusters, assignment))
    head, tail = list(loads), list(loads)
    for a, b in edges:
        head[b] = max(head[b], head[a] + loads[b])
    for a, b in reversed(edges):
        tail[a] = max(tail[a], tail[b] + loads[a])
    through = [h + t - load for h, t, load in zip(head, tail, loads, strict=True)]
    return max(loads), (max(through), sum(through))


def path_moves(
    clusters: Clusters,
    n_stages: int,
    assignment: list[int],
    ranges: StageRanges | None,
    graph: Adjacency,
) -> Iterator[list[int]]:
    """Yield the cuts of all moves that precedence, pins and pairs apart allow: to the nearest stage first."""
    predecessors, successors = graph
    stages, n = np.asarray(assignment), len(assignment)
    earliest, latest = np.asarray(ranges or ([0] * n, [n_stages - 1] * n))
    between: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for u, v in cut_arcs(clusters, assignment):
        between.setdefault((assignment[u], assignment[v]), []).append((u, v))
    for (a, b), arcs in sorted(between.items()):
        later = _reached({v for _, v in arcs}, successors, n)
        earlier = _reached({u for u, _ in arcs}, predecessors, n)
        if (stages[~later] == b).any():
            targets = range(b + 1, latest[later].min() + 1)
            yield from _legal(clusters, ranges, (np.where(later, np.maximum(stages, t), stages) for t in targets))
        if (stages[~earlier] == a).any():
            targets = range(a - 1, earliest[earlier].max() - 1, -1)
            yield from _legal(clusters, ranges, (np.where(earlier, np.minimum(stages, t), stages) for t in targets))


def _legal(clusters: Clusters, ranges: StageRanges | None, cuts: Iterable[NDArray[np.int64]]) -> Iterator[list[int]]:
    return (cut for cut in (each.tolist() for each in cuts) if is_legal(clusters, ranges, cut))


def _reached(start: set[int], neighbours: Sequence[Sequence[int]], n: int) -> NDArray[np.bool_]:
    """Return which of n clusters the start leads to, the start included."""
    reached, pending = set(start), list(start)
    while pending:
        for other in neighbours[pending.pop()]:
            if other not in reached:
                reached.add(other)
                pending.append(other)
    found = np.zeros(n, dtype=np.bool_)
    found[list(reached)] = True
    return found


def is_legal(clusters: Clusters, ranges: StageRanges | None, assignment: Sequence[int]) -> bool:
    """Return whether a cut that respects precedence also respects pins and pairs apart."""
    is_pinned = ranges is None or (all(map(le, ranges[0], assignment)) and all(map(le, assignment, ranges[1])))
    return is_pinned and all(assignment[a] < assignment[b] for a, b in clusters.strict_arcs)


def carry(assignment: list[int], cluster: int, target: int, along: Sequence[Sequence[int]]) -> None:
    """Move a cluster to a stage, in place, with all that precedence takes along."""
    onwards, pending = target > assignment[cluster], [cluster]
    assignment[cluster] = target
    while pending:
        for other in along[pending.pop()]:
            if assignment[other] != target and (assignment[other] < target) == onwards:
                assignment[other] = target
                pending.append(other)
