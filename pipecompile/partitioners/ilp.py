"""The least bottleneck as a mixed-integer program over step variables, given an incumbent to beat.

    minimise T    subject to    load(s) <= T    for every stage s,   T < incumbent

The incumbent does most of the work before the solver starts: `contract` melts what cannot be apart below it, `windows`
fixes most steps. What is left is small. An infeasible model is a success: the incumbent is optimal.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from time import monotonic

import pulp

from pipecompile.partitioners.anchors import anchor_bound
from pipecompile.partitioners.clusters import Clusters, Stages
from pipecompile.partitioners.contraction import contract
from pipecompile.partitioners.dp import GAP
from pipecompile.partitioners.loads import bottleneck, fits, loads
from pipecompile.partitioners.steps import Steps, run, steps
from pipecompile.partitioners.traffic import Traffic
from pipecompile.partitioners.windows import Window, windows

__all__ = ["improve"]

FEW = 400
"""Step variables up to which the model is so easy that the anchors' bound is not worth its time."""

LARGEST = 200_000
"""Step variables beyond which no model is built: writing it down alone would take minutes."""


def improve(clusters: Clusters, stages: Stages, incumbent: Sequence[int], deadline: float) -> tuple[list[int], float]:
    """The best cut found by the deadline, at worst the incumbent, and a proven lower bound of the bottleneck."""
    best = list(incumbent)
    scale = bottleneck(clusters, stages, best)
    if scale == 0:
        return best, 0.0
    target = scale * (1 - GAP / 2)
    small = contract(clusters, stages, target)
    window = windows(small, stages, target)
    if any(first > last for first, last in window):
        return best, target
    n_steps = sum(last - first for first, last in window)
    bound = anchor_bound(small, stages, target, deadline) if n_steps > FEW else 0.0
    if bound >= target or n_steps > LARGEST:
        return best, min(bound, target)
    made = _model(small, stages, window, scale, bound)
    while True:
        outcome = run(made.model, deadline - monotonic())
        if not outcome.found or monotonic() > deadline + 1:
            break
        stage = made.stages()
        if not (covers := _covers(small, stages, stage)):
            best = min(best, clusters.adopted(small, stage), key=lambda s: bottleneck(clusters, stages, s))
            break
        for s, cluster_set in covers:  # fits only within the solver's tolerance: forbid it and go on
            made.require(len(cluster_set) - 1, pulp.lpSum(made.inside(v, s) for v in cluster_set))
    bound = max(bound, min(outcome.bound * scale, target))
    if 2 * bottleneck(clusters, stages, best) > scale:
        return best, bound
    best, proven = improve(
        clusters, stages, best, deadline
    )  # the solver errs by a millionth of the incumbent's bottleneck
    return best, max(bound, proven)


def _covers(clusters: Clusters, stages: Stages, stage: Sequence[int]) -> list[tuple[int, list[int]]]:
    rows = enumerate(zip(loads(clusters, stages, stage), stages.limit, strict=True))
    return [
        (s, [v for v, at in enumerate(stage) if at == s]) for s, (load, limit) in rows if not fits(load.memory, limit)
    ]


def _model(clusters: Clusters, stages: Stages, window: Sequence[Window], scale: float, bound: float) -> Steps:
    """Times are divided by `scale`, the incumbent, and bytes by the limit, so that all coefficients are at most 1."""
    made = steps(clusters, window, len(stages))
    bottleneck = pulp.LpVariable("bottleneck", bound / scale, 1 - GAP / 2)
    made.model.setObjective(bottleneck + 0)
    traffic = Traffic(made, stages)
    for flow in clusters.flows:
        traffic.add(flow, flow.time / scale)
    for s, (speed, limit) in enumerate(zip(stages.speed, stages.limit, strict=True)):
        inside = [(v, made.inside(v, s)) for v, (first, last) in enumerate(window) if first <= s <= last]
        parts = [
            pulp.lpSum(clusters.time[v] / speed / scale * term for v, term in inside),
            traffic.sent[s],
            traffic.received[s],
        ]
        for load in map(pulp.lpSum, parts if stages.overlap else [parts]):
            made.require(bottleneck, load)
        if isfinite(limit):
            held = [(clusters.bytes[v] + clusters.activation[v] * stages.in_flight[s], term) for v, term in inside]
            unit = limit or max((amount for amount, _ in held), default=0.0) or 1.0
            made.require(limit / unit, pulp.lpSum(amount / unit * term for amount, term in held))
    return made
