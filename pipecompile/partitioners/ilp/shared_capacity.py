"""A lower bound from all stages together: the time that every stage has left for work after its tensors have been moved.

    load of a stage below the target T   ├──── work ────┼─ tensors ─┤        tensors(v): the least seconds of tensors of a stage
                                         0        at most T - tensors(v)                 that holds v, with a load of at most T

The work of a stage S is at most T - tensors(v) for every v in S. So the sum of work(v) / (T - tensors(v)) over S is at most 1, and
over all clusters at most the number of stages, or the sum of their speeds. The least T for which that holds is a lower bound. It is
strong where every stage moves tensors, as in random graphs, which linear programs of all stages do not see: they put a part of each
cluster into every stage, and nothing crosses.

Each tensors(v) is a linear program with precedence: two boundaries, ancestors of v not after and descendants not before.
"""

from __future__ import annotations

from math import fsum
from time import monotonic

import numpy as np

from pipecompile.partitioners.bounds.separations import Relation, has_time_for_products, separated_pairs
from pipecompile.partitioners.clusters import Clusters, transitive_closure, transitive_reduction
from pipecompile.partitioners.ilp.solver_backend import LinearExpr, Mip
from pipecompile.partitioners.ilp.step_variables import StepVariables
from pipecompile.partitioners.ilp.traffic_rows import add_send_variable
from pipecompile.partitioners.machine import Machine

__all__ = ["capacity_bound"]

MAX_CLUSTERS = 500
"""Clusters up to which the bound is computed: there is a linear program of them for each, in some tens of milliseconds."""

MIDDLE = 1
"""The stage of an anchor, of three: before, here, after."""

SLACK = 1e-6
"""Error of the solver and of the sums, as a fraction of the target."""


def capacity_bound(clusters: Clusters, machine: Machine, target: float, deadline: float) -> float:
    """Return a lower bound of the bottleneck of every cut of at most `target`, in seconds; `target` if there is no such cut.

    Clusters with the most work come first; those that are left at the deadline count without tensors.
    """
    n = len(clusters)
    if machine.overlap or not machine.min_link_factor or n > MAX_CLUSTERS or not has_time_for_products(n, 9, deadline):
        return 0.0
    closure = transitive_closure(clusters)
    program = _StageProgram(clusters, machine, target, closure, deadline)
    tensors = [0.0] * n
    for anchor in sorted(range(n), key=lambda v: -clusters.time[v]):
        if monotonic() > deadline or not clusters.time[anchor]:
            break
        tensors[anchor] = program.least_tensors(anchor, deadline - monotonic())
    speed = fsum(machine.speed[d] for d in machine.device_of)
    return _least_target(clusters.time, tensors, speed, target) - SLACK * target


class _StageProgram:
    """The stage of one anchor at a time, at the highest speed and the least link factor; memory is ignored."""

    def __init__(self, clusters: Clusters, machine: Machine, target: float, closure: Relation, deadline: float) -> None:
        self.clusters, self.machine, self.target, self.closure = clusters, machine, target, closure
        self.arcs = transitive_reduction(clusters)
        self.separated = separated_pairs(clusters, machine, target, closure, deadline)

    def least_tensors(self, anchor: int, seconds: float) -> float:
        """Return the least seconds of tensors of a stage of at most the target with the anchor; at least the target if there is none."""
        mip, _, tensors = self._stage_with(anchor)
        (bound,) = mip.minimise_relaxed([tensors], seconds)
        return min(max(bound - SLACK, 0.0), 1.0) * self.target

    def _stage_with(self, anchor: int) -> tuple[Mip, StepVariables, LinearExpr]:
        """Return the program of stages of at most the target with the anchor, their step variables and their tensors."""
        here = self.closure[anchor].astype(np.int64)
        earliest = (here + self.separated[anchor]).tolist()
        latest = (2 - self.closure[:, anchor].astype(np.int64) - self.separated[:, anchor]).tolist()
        mip = Mip()
        steps = StepVariables(mip, earliest, latest)
        steps.add_monotonicity(range(len(self.clusters)), range(-1, 3))
        steps.add_precedence(self.arcs, (), range(-1, 3))
        tensors = self._tensors(mip, steps)
        work = LinearExpr()
        for v, time in enumerate(self.clusters.time):
            work.add(steps.in_stage(v, MIDDLE), time / max(self.machine.speed) / self.target)
        mip.add_row(1.0 + SLACK, work + tensors)
        return mip, steps, tensors

    def _tensors(self, mip: Mip, steps: StepVariables) -> LinearExpr:
        """Return the time that the middle stage sends and receives, as a fraction of the target."""
        tensors, factor = LinearExpr(), self.machine.min_link_factor / self.target
        for flow in self.clusters.flows:
            here = steps.in_stage(flow.source, MIDDLE)
            received = mip.add_maximum(steps.in_stage(consumer, MIDDLE) - here for consumer in flow.consumers)
            tensors.add(add_send_variable(steps, flow, MIDDLE), flow.time * factor).add(received, flow.time * factor)
        return tensors


def _least_target(work: tuple[float, ...], tensors: list[float], speed: float, target: float) -> float:
    """Return the least T of at most the target such that work / (T - tensors) adds up to at most the speed; the target if none is."""
    low, high = 0.0, target
    for _ in range(50):
        middle = (low + high) / 2
        fits = all(t < middle for t, amount in zip(tensors, work, strict=True) if amount)
        if fits and fsum(amount / (middle - t) for t, amount in zip(tensors, work, strict=True) if amount) <= speed:
            high = middle
        else:
            low = middle
    return high
