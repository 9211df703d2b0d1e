"""A lower bound from one stage: the least load of a stage with at least the average weight of all stages.

    before  |  here  |  after          three stages, only the load of `here` counts;
            |  >= 1  |                 the clusters weigh as much as there are stages, so some stage weighs at least 1

With work as weight, some stage does at least the average work, and the bound is that work and the tensors that it cannot avoid: more
than the average where every stage moves tensors, as in random graphs. Any other weights give a bound as well. The three stages
are those of Archer et al., "Practical Performance Guarantees for Pipelined DNN Inference", ICML 2024. Linear programs of a stage are
weaker: they put a part of each cluster inside, and nothing crosses. So this is an integer program; what it has proven at the
deadline is a bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import fsum
from time import monotonic

from pipecompile.partitioners.clusters import Clusters, transitive_reduction
from pipecompile.partitioners.ilp.one_stage import SOLVER_TOLERANCE
from pipecompile.partitioners.ilp.solver_backend import LinearExpr, Mip
from pipecompile.partitioners.machine import Machine

__all__ = ["add_stage", "average_bound", "stage_load"]

MAX_CLUSTERS = 500
"""Clusters up to which the bound is computed: a program of 200 takes some seconds."""

GAP = 1e-4
"""Absolute gap to which the program is solved, as a fraction of the target."""


def average_bound(
    clusters: Clusters, machine: Machine, weights: Sequence[float], target: float, deadline: float
) -> float:
    """Return a lower bound of the bottleneck of every cut, in seconds; `target` if there is no cut below it. 0 where stages are not
    alike.
    """
    total = fsum(weights)
    is_alike = not machine.overlap and machine.min_link_factor > 0 and len(set(machine.speed)) == 1
    if not is_alike or not total or len(clusters) > MAX_CLUSTERS:
        return 0.0
    mip = Mip()
    inside = add_stage(mip, len(clusters), transitive_reduction(clusters))
    weight = LinearExpr()
    for v, own in enumerate(weights):
        weight.add(inside[v], own / total * len(machine))
    mip.add_row(weight, 1.0 - SOLVER_TOLERANCE)
    result = mip.minimise(stage_load(mip, inside, clusters, machine, target), deadline - monotonic(), gap=GAP)
    if result.is_interrupted:
        raise KeyboardInterrupt
    return target * min(1.0, max(result.bound - SOLVER_TOLERANCE, 0.0))


def add_stage(mip: Mip, n: int, arcs: Sequence[tuple[int, int]]) -> list[LinearExpr]:
    """Return 1 for each of n clusters in the stage, of clusters before it, in it and after it by precedence. Variables for the stage itself,
    not for its two boundaries, halve the solver's time.
    """
    before = [mip.add_variable(integer=True) for _ in range(n)]
    inside = [mip.add_variable(integer=True) for _ in range(n)]
    for v in range(n):
        mip.add_row(1.0, before[v] + inside[v])
    for a, b in arcs:
        mip.add_row(before[a], before[b])
        mip.add_row(before[a] + inside[a], before[b] + inside[b])
    return inside


def stage_load(
    mip: Mip, inside: Sequence[LinearExpr], clusters: Clusters, machine: Machine, target: float
) -> LinearExpr:
    """Return the work and the tensors of the stage, as a fraction of the target; a sender pays once for each tensor."""
    load, factor = LinearExpr(), machine.min_link_factor / target
    for v, time in enumerate(clusters.time):
        load.add(inside[v], time / machine.speed[0] / target)
    for flow in clusters.flows:
        source, consumers = inside[flow.source], [inside[consumer] for consumer in flow.consumers]
        load.add(mip.add_maximum(source - consumer for consumer in consumers), flow.time * factor)
        load.add(mip.add_maximum(consumer - source for consumer in consumers), flow.time * factor)
    return load
