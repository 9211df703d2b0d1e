"""The objective, in one place: what every stage of an assignment has to do and to hold.

    load(s) = compute(s) / speed[s] + sent(s) + received(s)          or, with overlap, the largest of the three
    memory(s) = bytes(s) + in_flight[s] * activation(s)

With multicast, sent(s) counts a tensor once; without, once per receiving stage. The bottleneck is the largest load.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pipecompile.errors import VerifyError
from pipecompile.partitioners.clusters import Clusters, Stages, clusters_of
from pipecompile.partitioners.faults import assignment_faults
from pipecompile.partitioners.problem import Problem

__all__ = ["TOLERANCE", "StageLoad", "bottleneck", "fits", "loads", "stage_loads", "verify_assignment"]

TOLERANCE = 1e-9
"""Relative slack of every comparison with a memory limit: sums in another order differ by rounding."""


@dataclass(frozen=True, slots=True)
class StageLoad:
    """One stage of an assignment. `load` is what the bottleneck is the maximum of."""

    compute: float
    sent: float
    received: float
    memory: float
    load: float


def stage_loads(problem: Problem, stage_of: Mapping[str, int], n_stages: int) -> tuple[StageLoad, ...]:
    """The load of every stage of an assignment of nodes. O(nodes + tensors)."""
    return loads(clusters_of(problem), Stages.of(problem, n_stages), [stage_of[node.name] for node in problem.nodes])


def loads(clusters: Clusters, stages: Stages, stage: Sequence[int]) -> tuple[StageLoad, ...]:
    """The same for an assignment of clusters."""
    compute, sent, received, memory = ([0.0] * len(stages) for _ in range(4))
    for cluster, s in enumerate(stage):
        compute[s] += clusters.time[cluster]
        memory[s] += clusters.bytes[cluster] + clusters.activation[cluster] * stages.in_flight[s]
    for flow in clusters.flows:
        source = stage[flow.source]
        receivers = {stage[consumer] for consumer in flow.consumers} - {source}
        sent[source] += flow.time * (min(len(receivers), 1) if stages.multicast else len(receivers))
        for s in receivers:
            received[s] += flow.time
    compute = [time / speed for time, speed in zip(compute, stages.speed, strict=True)]
    rows = zip(compute, sent, received, memory, strict=True)
    return tuple(StageLoad(c, o, i, m, max(c, o, i) if stages.overlap else c + o + i) for c, o, i, m in rows)


def bottleneck(clusters: Clusters, stages: Stages, stage: Sequence[int]) -> float:
    """The largest load of an assignment; infinite when it does not fit in memory."""
    rows = loads(clusters, stages, stage)
    fit = all(fits(row.memory, limit) for row, limit in zip(rows, stages.limit, strict=True))
    return max(row.load for row in rows) if fit else float("inf")


def fits(memory: float, limit: float) -> bool:
    """Whether so much memory is within the limit, up to rounding."""
    return memory <= limit * (1 + TOLERANCE)


def verify_assignment(problem: Problem, stage_of: Mapping[str, int], n_stages: int) -> None:
    """Raise VerifyError with every fault of an assignment: coverage, range, precedence, groups, memory."""
    faults = assignment_faults(problem, stage_of, n_stages)
    placed = {node.name: stage_of.get(node.name, -1) for node in problem.nodes}
    if all(0 <= stage < n_stages for stage in placed.values()):
        limits = Stages.of(problem, n_stages).limit
        for number, (load, limit) in enumerate(zip(stage_loads(problem, placed, n_stages), limits, strict=True)):
            if not fits(load.memory, limit):
                faults.append(f"stage {number} holds {load.memory:g} bytes, its limit is {limit:g}")
    if faults:
        raise VerifyError("partition", faults)
