"""A lower bound from single stages: the least load of the stage that holds a given cluster, its anchor.

    before  |  here  |  after          three stages, v is here, only the load of `here` counts;
            |   v    |                 however many stages there are, that of v is one of these

Where a cluster alone, with its tensors, takes longer than the bound, this bound is strong: closing a stage around it costs more than
the average load. `cut_bound` asks for the set around an anchor of least work and crossing tensors, whatever the precedence: a
minimum cut (Picard, "Maximal closure of a graph", 1976), so its linear program has an integer optimum, in hundredths of a second.
`anchor_bound` adds precedence: an integer program with windows of at most three stages, where ancestors of v are not after and
descendants not before. `ilp/shared_capacity.py` adds the tensors of all anchors up.
"""

from __future__ import annotations

from time import monotonic

from pipecompile.partitioners.clusters import Clusters, transitive_closure, transitive_reduction
from pipecompile.partitioners.ilp.solver_backend import LinearExpr, Mip
from pipecompile.partitioners.ilp.step_variables import StepVariables
from pipecompile.partitioners.ilp.traffic_rows import add_send_variable
from pipecompile.partitioners.machine import Machine

__all__ = ["anchor_bound", "cut_bound"]

N_ANCHORS = 4
"""Anchors that are tried with precedence: the cluster with the most work, then those with the largest load if alone in a stage."""

MAX_CLUSTERS = 2000
"""Clusters up to which anchors are tried."""


def cut_bound(clusters: Clusters, machine: Machine, low: float, target: float, deadline: float) -> float:
    """Return the largest minimum cut around an anchor, in seconds, at least `low`; `target` if one proves that no cut is below it."""
    if not machine.min_link_factor or len(clusters) > MAX_CLUSTERS:
        return low
    alone, program = _loads_alone(clusters, machine), None
    for anchor in sorted(range(len(clusters)), key=lambda v: -alone[v]):
        if alone[anchor] <= low or low >= target or monotonic() > deadline:
            break
        program = program or _CutProgram(clusters, machine, target)
        low = max(low, min(program.least_load(anchor, deadline - monotonic()), target))
    return low


class _CutProgram:
    """The program of one set of clusters at the highest speed and the least link factor: work inside and tensors that cross."""

    def __init__(self, clusters: Clusters, machine: Machine, target: float) -> None:
        self.mip, self.target = Mip(), target
        self.inside = [self.mip.add_variable() for _ in range(len(clusters))]
        parts = work, sent, received = LinearExpr(), LinearExpr(), LinearExpr()
        for v, time in enumerate(clusters.time):
            work.add(self.inside[v], time / max(machine.speed) / target)
        for flow in clusters.flows:
            here, there = self.inside[flow.source], [self.inside[consumer] for consumer in flow.consumers]
            time = flow.time * machine.min_link_factor / target
            sent.add(self.mip.add_maximum(here - consumer for consumer in there), time)
            received.add(self.mip.add_maximum(consumer - here for consumer in there), time)
        if machine.overlap:
            self.load = self.mip.add_variable(0.0, float("inf"))
            for part in parts:
                self.mip.add_row(self.load, part)
        else:
            self.load = work.add(sent).add(received)  # in place: `work` is the sum from here on

    def least_load(self, anchor: int, seconds: float) -> float:
        """Return the least load of a set with the anchor, in seconds."""
        (column,) = self.inside[anchor].terms
        self.mip.lower[column] = 1.0
        (bound,) = self.mip.minimise_relaxed([self.load], seconds)
        self.mip.lower[column] = 0.0
        return bound * self.target * (1 - 1e-9)


def anchor_bound(clusters: Clusters, machine: Machine, target: float, deadline: float) -> float:
    """Return the best bound of a few anchors, in seconds; `target` if one proves that no cut is below it."""
    best = 0.0
    if not machine.min_link_factor or len(clusters) > MAX_CLUSTERS:
        return best
    closure = transitive_closure(clusters)
    for anchor in _anchors(clusters, machine):
        earliest, latest = closure[anchor].astype(int).tolist(), (2 - closure[:, anchor].astype(int)).tolist()
        best = max(best, _least_load(clusters, machine, earliest, latest, target, deadline - monotonic()))
        if best >= target or monotonic() > deadline:
            break
    return best


def _anchors(clusters: Clusters, machine: Machine) -> list[int]:
    alone, indices = _loads_alone(clusters, machine), range(len(clusters))
    ranked = [max(indices, key=lambda v: clusters.time[v]), *sorted(indices, key=lambda v: -alone[v])]
    return list(dict.fromkeys(ranked))[:N_ANCHORS]


def _loads_alone(clusters: Clusters, machine: Machine) -> list[float]:
    """Return, per cluster, the load of a stage with no other one, in seconds."""
    loads = [time / max(machine.speed) for time in clusters.time]
    for flow in clusters.flows:
        for end in (flow.source, *flow.consumers):
            loads[end] += flow.time * machine.min_link_factor
    return loads


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
