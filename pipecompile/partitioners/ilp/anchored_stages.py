"""A lower bound from single stages: the least load of the stage that holds a given cluster, its anchor.

    before  |  here  |  after          three stages, v is here, only the load of `here` counts;
            |   v    |                 however many stages there are, that of v is one of these

Expensive tensors make this bound strong: closing a stage around a heavy cluster costs more than the average load. Each anchor
is an integer program with windows of at most three stages, where ancestors of v are not after and descendants not before.
"""

from __future__ import annotations

from time import monotonic

from pipecompile.partitioners.clusters import Clusters, transitive_closure, transitive_reduction
from pipecompile.partitioners.ilp.solver_backend import LinearExpr, Mip
from pipecompile.partitioners.ilp.step_variables import StepVariables
from pipecompile.partitioners.ilp.traffic_rows import add_send_variable
from pipecompile.partitioners.machine import Machine

__all__ = ["anchor_bound"]

N_ANCHORS = 4
"""Anchors that are tried: the cluster with the most work, then those with the largest load if alone in a stage."""

MAX_CLUSTERS = 2000
"""Clusters up to which anchors are tried."""


def anchor_bound(clusters: Clusters, machine: Machine, target: float, deadline: float) -> float:
    """Return the best bound of a few anchors, in seconds; `target` if one proves that no cut is below it."""
    best = 0.0
    if not machine.min_link_factor or len(clusters) > MAX_CLUSTERS:
        return best
    closure = transitive_closure(clusters)
    for anchor in _anchors(clusters):
        earliest, latest = closure[anchor].astype(int).tolist(), (2 - closure[:, anchor].astype(int)).tolist()
        best = max(best, _least_load(clusters, machine, earliest, latest, target, deadline - monotonic()))
        if best >= target or monotonic() > deadline:
            break
    return best


def _anchors(clusters: Clusters) -> list[int]:
    load_alone = list(clusters.time)
    for flow in clusters.flows:
        for end in (flow.source, *flow.consumers):
            load_alone[end] += flow.time
    indices = range(len(clusters))
    ranked = [max(indices, key=lambda v: clusters.time[v]), *sorted(indices, key=lambda v: -load_alone[v])]
    return list(dict.fromkeys(ranked))[:N_ANCHORS]


def _least_load(
    clusters: Clusters, machine: Machine, earliest: list[int], latest: list[int], target: float, seconds: float
) -> float:
    """Return the least load of the middle stage at the highest speed and the least link factor; memory is ignored."""
    mip = Mip()
    load = mip.add_variable()
    steps = StepVariables(mip, earliest, latest)
    steps.add_monotonicity(range(len(clusters)), range(-1, 3))
    steps.add_precedence(transitive_reduction(clusters), clusters.strict_arcs, range(-1, 3))
    work, sent, received = LinearExpr(), LinearExpr(), LinearExpr()
    for v, time in enumerate(clusters.time):
        work.add(steps.in_stage(v, 1), time / max(machine.speed) / target)
    time_factor = machine.min_link_factor / target
    for flow in clusters.flows:
        sent.add(add_send_variable(steps, flow, 1), flow.time * time_factor)
        here = steps.in_stage(flow.source, 1)
        receives = mip.add_maximum(steps.in_stage(consumer, 1) - here for consumer in flow.consumers)
        received.add(receives, flow.time * time_factor)
    for part in (work, sent, received) if machine.overlap else (work.add(sent).add(received),):
        mip.add_row(load, part)
    result = mip.minimise(load, seconds)
    return target * min(1.0, max(result.bound, 0.0))
