"""A lower bound that looks at one stage only: whichever stage holds cluster v, how light can it be?

    before  |  here  |  after          three stages, v is here, only the load of `here` counts;
            |   v    |                 however many stages there are, that of v is one of these

With dear tensors it is what decides: closing a stage around a heavy cluster costs more than work shared evenly. Each anchor
is an integer program with windows of at most three stages, where ancestors are not after and descendants not before.
"""

from __future__ import annotations

from time import monotonic

from pipecompile.partitioners.bounds.reachability import reachable, skeleton
from pipecompile.partitioners.clusters import Clusters
from pipecompile.partitioners.ilp.solver_backend import Linear, Mip
from pipecompile.partitioners.ilp.step_variables import Steps
from pipecompile.partitioners.ilp.traffic_rows import departure
from pipecompile.partitioners.machine import Stages

__all__ = ["anchor_bound"]

COUNT = 4
"""How many anchors are tried: the cluster with the most work, then those whose stage would be fullest were they alone."""

LARGEST = 2000
"""Clusters up to which anchors are tried."""


def anchor_bound(clusters: Clusters, stages: Stages, target: float, deadline: float) -> float:
    """The best bound of a few anchors; `target` when one shows that nothing stays below it."""
    best = 0.0
    if not stages.cheapest or len(clusters) > LARGEST:
        return best
    reach = reachable(clusters)
    for anchor in _anchors(clusters):
        first, last = reach[anchor].astype(int).tolist(), (2 - reach[:, anchor].astype(int)).tolist()
        best = max(best, _lightest(clusters, stages, first, last, target, deadline - monotonic()))
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


def _lightest(
    clusters: Clusters, stages: Stages, first: list[int], last: list[int], target: float, seconds: float
) -> float:
    """The least load of the middle stage. Its speed is the highest there is, links the cheapest; memory is not looked at."""
    mip = Mip()
    load = mip.variable()
    steps = Steps(mip, first, last)
    steps.rise(range(len(clusters)), range(-1, 3))
    steps.order(skeleton(clusters), clusters.strict, range(-1, 3))
    work, sent, received = Linear(), Linear(), Linear()
    for v, time in enumerate(clusters.time):
        work.add(steps.inside(v, 1), time / max(stages.speed) / target)
    price = stages.cheapest / target
    for flow in clusters.flows:
        sent.add(departure(steps, flow, 1), flow.time * price)
        here = steps.inside(flow.source, 1)
        received.add(mip.positive(steps.inside(consumer, 1) - here for consumer in flow.consumers), flow.time * price)
    for part in (work, sent, received) if stages.overlap else (work.add(sent).add(received),):
        mip.require(load, part)
    outcome = mip.minimise(load, seconds)
    return target * min(1.0, max(outcome.bound, 0.0))
