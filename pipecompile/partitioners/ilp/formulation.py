"""The least bottleneck below a target as a mixed-integer program over step variables.

    minimise T    subject to    load(d) <= T and memory(d) <= limit(d) for every device d,   T <= target

Times are divided by the target and bytes by the limit, so that coefficients are at most 1. Windows say where each cluster
can be at all.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, isfinite

from pipecompile.partitioners.bounds.reachability import skeleton
from pipecompile.partitioners.bounds.stage_windows import Windows
from pipecompile.partitioners.clusters import Clusters
from pipecompile.partitioners.ilp.consumer_counts import Readers
from pipecompile.partitioners.ilp.memory_rows import Holdings
from pipecompile.partitioners.ilp.one_stage import SLACK
from pipecompile.partitioners.ilp.solver_backend import Linear, Mip
from pipecompile.partitioners.ilp.step_variables import Steps
from pipecompile.partitioners.ilp.traffic_rows import Traffic
from pipecompile.partitioners.machine import Stages

__all__ = ["Model", "model"]


@dataclass(frozen=True, slots=True)
class Model:
    """A program, its step variables, and what it minimises."""

    mip: Mip
    steps: Steps
    bottleneck: Linear


def model(clusters: Clusters, stages: Stages, windows: Windows, target: float, bound: float = 0.0) -> Model:
    """The program of all stages, its bottleneck a share of the target. `bound` is known not to be undercut."""
    mip = Mip()
    bottleneck = mip.variable(min(bound / target, 1.0), 1.0)
    steps = Steps(mip, windows.first.tolist(), windows.last.tolist())
    boundaries = range(-1, len(stages))
    steps.rise(range(len(clusters)), boundaries)
    steps.order(skeleton(clusters), windows.apart, boundaries)
    traffic = Traffic(steps, clusters, stages, Readers(clusters, windows), target)
    roof = max((limit for limit in stages.limit if isfinite(limit)), default=inf)
    unit = roof if 0 < roof < inf else max([*clusters.bytes, *clusters.activation, 0.0]) or 1.0
    holdings = Holdings(steps, clusters, stages, traffic, target, unit, roof)
    for d, speed in enumerate(stages.speed):
        compute = Linear()
        for s in stages.on(d):
            for v in holdings.members[s]:
                compute.add(steps.inside(v, s), clusters.time[v] / speed / target)
            compute.add(holdings.again(s))
        parts = [compute, traffic.sent[d], traffic.received[d]]
        for load in parts if stages.overlap else [parts[0] + parts[1] + parts[2]]:
            mip.require(bottleneck, load)
        if isfinite(stages.limit[d]):
            mip.require(stages.limit[d] / unit, holdings.memory(d))
    _bound_work(mip, steps, clusters, windows, target)
    return Model(mip, steps, bottleneck)


def _bound_work(mip: Mip, steps: Steps, clusters: Clusters, windows: Windows, target: float) -> None:
    for s, (least, most) in enumerate(zip(windows.least, windows.most, strict=True)):
        if least > 0 or most < windows.total:
            work = Linear()
            for v, time in enumerate(clusters.time):
                work.add(steps.below(v, s), time / target)
            mip.require(work, least / target - SLACK)
            mip.require(most / target + SLACK, work)
