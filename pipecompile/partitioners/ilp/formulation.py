"""The partition problem below a target as a mixed-integer program over step variables.

    minimise T    subject to    load(d) <= T and memory(d) <= limit(d) for every device d,   T <= target

Times are divided by the target and bytes by the largest limit, so that coefficients are at most 1. Stage windows restrict
where each cluster can be.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, isfinite

from pipecompile.partitioners.bounds.stage_windows import StageWindows
from pipecompile.partitioners.clusters import Clusters, transitive_reduction
from pipecompile.partitioners.ilp.consumer_counts import ConsumerCounts
from pipecompile.partitioners.ilp.memory_rows import MemoryRows
from pipecompile.partitioners.ilp.one_stage import SOLVER_TOLERANCE
from pipecompile.partitioners.ilp.solver_backend import LinearExpr, Mip
from pipecompile.partitioners.ilp.step_variables import StepVariables
from pipecompile.partitioners.ilp.traffic_rows import TrafficRows
from pipecompile.partitioners.machine import Machine

__all__ = ["PartitionModel", "build_model"]


@dataclass(frozen=True, slots=True)
class PartitionModel:
    """A program, its step variables, and its objective, the bottleneck as a fraction of the target."""

    mip: Mip
    steps: StepVariables
    bottleneck: LinearExpr


def build_model(
    clusters: Clusters,
    machine: Machine,
    windows: StageWindows,
    target: float,
    bound: float = 0.0,
    deadline: float = inf,
) -> PartitionModel:
    """Return the program of all stages. `bound` is a proven lower bound of the bottleneck, in seconds. Raise OutOfTimeError at the
    deadline.
    """
    mip = Mip(deadline)
    bottleneck = mip.add_variable(min(bound / target, 1.0), 1.0)
    steps = StepVariables(mip, windows.earliest.tolist(), windows.latest.tolist())
    boundaries = range(-1, len(machine))
    steps.add_monotonicity(range(len(clusters)), boundaries)
    steps.add_precedence(transitive_reduction(clusters), windows.strict_pairs, boundaries)
    traffic = TrafficRows(steps, clusters, machine, ConsumerCounts(clusters, windows), target)
    max_limit = max((limit for limit in machine.memory_limit if isfinite(limit)), default=inf)
    unit = max_limit if 0 < max_limit < inf else max([*clusters.bytes, *clusters.activation, 0.0]) or 1.0
    memory = MemoryRows(steps, clusters, machine, traffic, target, unit, max_limit)
    for d, speed in enumerate(machine.speed):
        compute = LinearExpr()
        for s in machine.stages_on(d):
            for v in memory.members[s]:
                compute.add(steps.in_stage(v, s), clusters.time[v] / speed / target)
            compute.add(memory.recompute_time(s))
        parts = [compute, traffic.sent[d], traffic.received[d]]
        for load in parts if machine.overlap else [parts[0] + parts[1] + parts[2]]:
            mip.add_row(bottleneck, load)
        if isfinite(machine.memory_limit[d]):
            mip.add_row(machine.memory_limit[d] / unit, memory.memory(d))
    _bound_work(mip, steps, clusters, windows, target)
    return PartitionModel(mip, steps, bottleneck)


def _bound_work(mip: Mip, steps: StepVariables, clusters: Clusters, windows: StageWindows, target: float) -> None:
    """Add rows for the bounds of the cumulative work at every boundary."""
    for s, (least, most) in enumerate(zip(windows.min_work, windows.max_work, strict=True)):
        if least > 0 or most < windows.total_work:
            work = LinearExpr()
            for v, time in enumerate(clusters.time):
                work.add(steps.at_most(v, s), time / target)
            mip.add_row(work, least / target - SOLVER_TOLERANCE)
            mip.add_row(most / target + SOLVER_TOLERANCE, work)
