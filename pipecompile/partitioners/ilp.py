"""The least bottleneck as a mixed-integer program over step variables, given an incumbent to beat.

    minimise T    subject to    load(s) <= T    for every stage s,   T < incumbent

The incumbent does most of the work before the solver starts: `contract` melts what cannot be apart below it, `windows`
fixes most steps. What is left is small. An infeasible model is a success: the incumbent is optimal.

A tensor from u to one consumer v needs one variable per stage for all four of its sides, since

    apart(s) >= inside(u, s) - inside(v, s),  apart(s) >= 0        u is in s and v is not
    apart(s) -  inside(u, s) + inside(v, s)                        v is in s and u is not
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from math import isfinite
from time import monotonic

import pulp

from pipecompile.partitioners.clusters import Clusters, Flow, Stages
from pipecompile.partitioners.contraction import contract
from pipecompile.partitioners.loads import fits, loads
from pipecompile.partitioners.steps import Steps, Term, run, steps
from pipecompile.partitioners.windows import windows

__all__ = ["GAP", "improve"]

GAP = 1e-6
"""Relative distance of bottleneck and bound at which a partition counts as optimal."""

LARGEST = 200_000
"""Step variables beyond which no model is built: writing it down alone would take minutes."""


def improve(clusters: Clusters, stages: Stages, incumbent: Sequence[int], deadline: float) -> tuple[list[int], float]:
    """The best cut found by the deadline, at worst the incumbent, and a proven lower bound of the bottleneck."""
    best = list(incumbent)
    scale = max(load.load for load in loads(clusters, stages, best))
    target = scale * (1 - GAP / 2)
    small = contract(clusters, stages, target)
    window = windows(small, stages, target)
    if any(first > last for first, last in window):
        return best, target
    if sum(last - first for first, last in window) > LARGEST:
        return best, 0.0
    made = _model(small, stages, window, scale)
    while True:
        outcome = run(made.model, deadline - monotonic())
        if not outcome.found:
            break
        stage = made.stages()
        if not (covers := _covers(small, stages, stage)):
            by_name = small.stage_of(stage)
            best = min(best, [by_name[names[0]] for names in clusters.members], key=lambda s: _bottleneck(clusters, stages, s))
            break
        for s, cluster_set in covers:  # fits only within the solver's tolerance: forbid it and go on
            made.require(len(cluster_set) - 1, pulp.lpSum(made.inside(v, s) for v in cluster_set))
    return best, min(max(outcome.bound, 0.0), target / scale) * scale


def _bottleneck(clusters: Clusters, stages: Stages, stage: Sequence[int]) -> float:
    return max(load.load for load in loads(clusters, stages, stage))


def _covers(clusters: Clusters, stages: Stages, stage: Sequence[int]) -> list[tuple[int, list[int]]]:
    rows = enumerate(zip(loads(clusters, stages, stage), stages.limit, strict=True))
    return [(s, [v for v, at in enumerate(stage) if at == s]) for s, (load, limit) in rows if not fits(load.memory, limit)]


def _model(clusters: Clusters, stages: Stages, window: Sequence[tuple[int, int]], scale: float) -> Steps:
    """Times are divided by `scale`, the incumbent, and bytes by the limit, so that all coefficients are at most 1."""
    made = steps(clusters, window, len(stages))
    bottleneck = pulp.LpVariable("bottleneck", 0, 1 - GAP / 2)
    made.model.setObjective(bottleneck + 0)
    rows = _Rows(made, stages)
    for flow in clusters.flows:
        (rows.add_single if len(flow.consumers) == 1 else rows.add_many)(flow, flow.time / scale)
    for s, (speed, limit) in enumerate(zip(stages.speed, stages.limit, strict=True)):
        inside = [(v, made.inside(v, s)) for v, (first, last) in enumerate(window) if first <= s <= last]
        parts = [pulp.lpSum(clusters.time[v] / speed / scale * term for v, term in inside), rows.sent[s], rows.received[s]]
        for load in map(pulp.lpSum, parts if stages.overlap else [parts]):
            made.require(bottleneck, load)
        if isfinite(limit):
            held = [(clusters.bytes[v] + clusters.activation[v] * stages.in_flight[s], term) for v, term in inside]
            unit = limit or max((amount for amount, _ in held), default=0.0) or 1.0
            made.require(limit / unit, pulp.lpSum(amount / unit * term for amount, term in held))
    return made


class _Rows:
    """What each stage sends and receives, as lists of terms."""

    def __init__(self, made: Steps, stages: Stages) -> None:
        self.made, self.stages = made, stages
        self.sent: list[list[Term]] = [[] for _ in range(len(stages))]
        self.received: list[list[Term]] = [[] for _ in range(len(stages))]
        self._apart: dict[tuple[int, int, int], Term] = {}
        self._number = count()

    def add_single(self, flow: Flow, time: float) -> None:
        """One consumer. A value and its gradient, which goes the other way, share their variables."""
        low, high = sorted((flow.source, flow.consumers[0]))
        for s in range(len(self.stages)):
            difference = self.made.inside(low, s) - self.made.inside(high, s)
            if (low, high, s) not in self._apart:
                self._apart[low, high, s] = self.made.positive(f"apart_{low}_{high}_{s}", [difference])
            apart = self._apart[low, high, s]
            leaves, enters = (apart, apart - difference) if flow.source == low else (apart - difference, apart)
            self.sent[s].append(time * leaves)
            self.received[s].append(time * enters)

    def add_many(self, flow: Flow, time: float) -> None:
        """Several consumers: a variable for sending and one for receiving, per stage. Without multicast the sender pays
        the number of receiving stages, which it learns from the receivers."""
        number, sent, received, source = next(self._number), [], [], []
        most = 1 if self.stages.multicast else min(len(flow.consumers), len(self.stages) - 1)
        for s in range(len(self.stages)):
            source.append(self.made.inside(flow.source, s))
            apart = [source[s] - self.made.inside(consumer, s) for consumer in flow.consumers]
            sent.append(self.made.positive(f"sent_{number}_{s}", apart, most))
            received.append(self.made.positive(f"received_{number}_{s}", [-difference for difference in apart]))
            self.sent[s].append(time * sent[s])
            self.received[s].append(time * received[s])
        if not self.stages.multicast:
            for s in range(len(self.stages)):
                self.made.require(sent[s], pulp.lpSum(received) - most * (1 - source[s]))
            self.made.require(pulp.lpSum(sent), pulp.lpSum(received))
