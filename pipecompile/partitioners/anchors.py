"""A lower bound that looks at one stage only: whichever stage holds cluster v, how light can it be?

    before  |  here  |  after          three stages, v is here, only the load of `here` counts;
            |   v    |                 however many stages there are, that of v is one of these

With dear tensors it is what decides: closing a stage around a heavy cluster costs more than work shared evenly. Each anchor
is an integer program with windows of at most three stages, where ancestors are not after and descendants not before.
"""

from __future__ import annotations

from time import monotonic

import pulp

from pipecompile.partitioners.clusters import Clusters, Stages
from pipecompile.partitioners.steps import run, steps
from pipecompile.partitioners.traffic import Traffic
from pipecompile.partitioners.windows import Window, reachable

__all__ = ["anchor_bound"]

COUNT = 4
"""How many anchors are tried: the cluster with the most work, then those whose stage would be fullest were they alone."""


def anchor_bound(clusters: Clusters, stages: Stages, target: float, deadline: float) -> float:
    """The best bound of a few anchors; `target` when one shows that nothing stays below it."""
    reach = reachable(clusters)
    best = 0.0
    for anchor in _anchors(clusters):
        windows = [(int(reach[anchor, v]), 2 - int(reach[v, anchor])) for v in range(len(clusters))]
        best = max(best, _lightest(clusters, stages, windows, target, deadline - monotonic()))
        if best >= target or monotonic() > deadline:
            break
    return best


def _anchors(clusters: Clusters) -> list[int]:
    alone = list(clusters.time)
    for flow in clusters.flows:
        for end in (flow.source, *flow.consumers):
            alone[end] += flow.time
    ends = range(len(clusters))
    ranked = [max(ends, key=lambda v: clusters.time[v]), *sorted(ends, key=lambda v: -alone[v])]
    return list(dict.fromkeys(ranked))[:COUNT]


def _lightest(clusters: Clusters, stages: Stages, windows: list[Window], target: float, seconds: float) -> float:
    """The least load of the middle stage. Its speed is the highest there is, and memory is not looked at."""
    fastest = max(stages.speed)
    three = Stages((fastest,) * 3, (float("inf"),) * 3, (1.0,) * 3, stages.multicast, stages.overlap)
    made = steps(clusters, windows, 3)
    load = pulp.LpVariable("load", 0, 1)
    made.model.setObjective(load + 0)
    traffic = Traffic(made, three)
    for flow in clusters.flows:
        traffic.add(flow, flow.time / target)
    work = pulp.lpSum(time / fastest / target * made.inside(v, 1) for v, time in enumerate(clusters.time))
    parts = [work, pulp.lpSum(traffic.sent[1]), pulp.lpSum(traffic.received[1])]
    for part in parts if stages.overlap else [pulp.lpSum(parts)]:
        made.require(load, part)
    outcome = run(made.model, seconds)
    return target * min(1.0, max(outcome.bound, 0.0))
