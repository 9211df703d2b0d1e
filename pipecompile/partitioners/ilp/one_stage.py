"""The program of one stage below a target: the step variables of its two boundaries, its load and its memory.

    work   0 ───────── boundary s - 1 ───────── boundary s ───────── all
                            J        stage s        I            J and I: the clusters in the stages up to the boundary

A relaxation: the other stages are free, so the stage s of every cut below the target is a solution. The program is small,
since clusters whose windows exclude the stages s - 1, s and s + 1 are constants.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from pipecompile.partitioners.clusters import Clusters
from pipecompile.partitioners.ilp.consumer_counts import ConsumerCounts
from pipecompile.partitioners.ilp.solver_backend import LinearExpr, Mip
from pipecompile.partitioners.ilp.step_variables import StepVariables
from pipecompile.partitioners.ilp.traffic_rows import add_receive_variable, add_send_variable
from pipecompile.partitioners.machine import Machine

__all__ = ["SOLVER_TOLERANCE", "StageModel", "build_stage_model"]

SOLVER_TOLERANCE = 1e-6
"""Error of the solver, as a fraction of the target."""


@dataclass(frozen=True, slots=True)
class StageModel:
    """A program, its step variables, and the cumulative work at each boundary of the stage, as a fraction of the target."""

    mip: Mip
    steps: StepVariables
    work: dict[int, LinearExpr]


def build_stage_model(
    clusters: Clusters, machine: Machine, counts: ConsumerCounts, arcs: list[tuple[int, int]], target: float, s: int
) -> StageModel:
    """Return the program of stage s."""
    mip, windows = Mip(), counts.windows
    steps = StepVariables(mip, windows.earliest.tolist(), windows.latest.tolist())
    members = [v for v in range(len(clusters)) if steps.is_possible(v, s)]
    steps.add_monotonicity(members, range(s - 1, s + 1))
    steps.add_precedence(arcs, windows.strict_pairs, range(s - 1, s + 1))
    _add_load_rows(steps, counts, clusters, machine, members, s, target)
    _add_memory_row(mip, steps, clusters, machine, members, s)
    work = {b: _work_up_to(steps, clusters, members, b, target) for b in (s - 1, s) if 0 <= b < len(machine) - 1}
    for b, amount in work.items():
        mip.add_row(amount, windows.min_work[b] / target - SOLVER_TOLERANCE)
        mip.add_row(windows.max_work[b] / target + SOLVER_TOLERANCE, amount)
    return StageModel(mip, steps, work)


def _add_load_rows(
    steps: StepVariables, counts: ConsumerCounts, clusters: Clusters, machine: Machine, members: list[int], s: int,
    target: float,
) -> None:  # fmt: skip
    """Require that the load of the stage is at most the target, at the least link factor."""
    compute, sent, received = LinearExpr(), LinearExpr(), LinearExpr()
    recomputes = machine.recompute[s] is True
    for v in members:
        time = clusters.time[v] + (clusters.forward[v] if recomputes else 0.0)
        compute.add(steps.in_stage(v, s), time / machine.speed[s] / target)
    time_factor = machine.min_link_factor / target
    for number, flow in enumerate(clusters.flows if time_factor else ()):
        if steps.is_possible(flow.source, s):
            copies = 1 if machine.multicast else counts.min_stages_after(number, flow, s)
            sent.add(add_send_variable(steps, flow, s, copies), flow.time * time_factor)
        if any(steps.is_possible(consumer, s) for consumer in flow.consumers):
            received.add(add_receive_variable(steps, counts, number, flow, s), flow.time * time_factor)
    for load in (compute, sent, received) if machine.overlap else (compute.add(sent).add(received),):
        steps.mip.add_row(1.0, load)


def _add_memory_row(
    mip: Mip, steps: StepVariables, clusters: Clusters, machine: Machine, members: list[int], s: int
) -> None:
    """Require that a lower bound of the stage's memory fits: boundary buffers and shared bytes are ignored."""
    if not 0 < machine.memory_limit[s] < inf:
        return
    in_flight = machine.in_flight[s] if machine.recompute[s] is False else min(machine.in_flight[s], 1.0)
    memory = LinearExpr()
    for v in members:
        size = clusters.bytes[v] + in_flight * clusters.activation[v]
        memory.add(steps.in_stage(v, s), size / machine.memory_limit[s])
    mip.add_row(1.0 + SOLVER_TOLERANCE, memory)


def _work_up_to(
    steps: StepVariables, clusters: Clusters, members: list[int], boundary: int, target: float
) -> LinearExpr:
    """Return the work of all stages up to a boundary, as a fraction of the target."""
    in_members = set(members)
    fixed = (clusters.time[v] for v, latest in enumerate(steps.latest) if v not in in_members and latest <= boundary)
    work = LinearExpr(sum(fixed) / target)
    for v in members:
        work.add(steps.at_most(v, boundary), clusters.time[v] / target)
    return work
