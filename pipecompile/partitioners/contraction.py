"""Contraction of a graph of clusters to its coarse branches: what runs in a row becomes one cluster, side by side stays apart.

    stem ─┬─► a1 ─► a2 ─► a3 ─┬─► head          stem ─┬─► A ─┬─► head
          └─► b1 ─► b2 ─► b3 ─┘                       └─► B ─┘

A region between a cluster and its immediate postdominator, of which the cluster is the immediate dominator, is entered and left at
one place: a residual block. A region of little work becomes one cluster: its branches are too short to be worth a stage. Then
clusters in series are joined up to a cap. Both keep the precedence acyclic.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import networkx as nx

from pipecompile.partitioners.clusters import Clusters, adjacency, merge, transitive_reduction

__all__ = ["contract_branches"]


def contract_branches(clusters: Clusters, block: float, cap: float) -> Clusters:
    """Return the clusters with regions of at most `block` seconds joined, and series of at most `cap` seconds."""
    blocks = merge(clusters, _regions(clusters, block))
    return merge(blocks, _series(blocks, cap))


def _regions(clusters: Clusters, block: float) -> Iterator[list[int]]:
    """Yield the regions with one entry and one exit that take at most `block` seconds, without their exits."""
    n = len(clusters)
    graph = nx.DiGraph(clusters.arcs)
    graph.add_nodes_from(range(n))
    entries, exits = ([v for v, degree in degrees if not degree] for degrees in (graph.in_degree, graph.out_degree))
    graph.add_edges_from((-1, v) for v in entries)
    graph.add_edges_from((v, n) for v in exits)
    dominator = nx.immediate_dominators(graph, -1)
    postdominator = nx.immediate_dominators(graph.reverse(copy=False), n)
    for entry in range(n):
        end = postdominator[entry]
        if end != n and dominator[end] == entry:
            yield from _between(clusters, graph, entry, end, block)


def _between(clusters: Clusters, graph: nx.DiGraph, entry: int, end: int, block: float) -> Iterator[list[int]]:
    """Yield the clusters from `entry` to before `end` if they take at most `block` seconds."""
    region, pending, seconds = {entry}, [entry], clusters.time[entry]
    while pending and seconds <= block:
        for v in graph.successors(pending.pop()):
            if v != end and v not in region:
                region.add(v)
                pending.append(v)
                seconds += clusters.time[v]
    if seconds <= block and len(region) > 1:
        yield sorted(region)


def _series(clusters: Clusters, cap: float) -> Iterator[list[int]]:
    """Yield clusters in series, each the one successor of the one before and that its one predecessor, up to `cap` seconds."""
    predecessors, successors = adjacency(replace(clusters, arcs=tuple(transitive_reduction(clusters))))
    taken: set[int] = set()
    for v in range(len(clusters)):
        if v in taken:
            continue
        run, seconds = [v], clusters.time[v]
        while len(successors[run[-1]]) == 1:
            after = successors[run[-1]][0]
            if len(predecessors[after]) > 1 or seconds + clusters.time[after] > cap:
                break
            run.append(after)
            seconds += clusters.time[after]
        taken.update(run)
        if len(run) > 1:
            yield run
