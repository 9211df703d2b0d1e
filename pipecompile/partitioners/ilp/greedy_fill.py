"""Greedy construction of a cut below a target: fill one stage after another, each as much as possible.

    forwards    │ stage 0 ▶│ stage 1 ▶│ ...                    ...│◀ stage k - 2│◀ stage k - 1 │    backwards

The program of one stage (one_stage.py) minimises what remains for the other stages: the work beyond its end and the tensors
that cross it. This is the station-oriented scheme of assembly line balancing. A stage can be filled such that the next one
cannot end anywhere; then the construction fails, possibly from one side only. It is stronger than moves from cut to cut, since
later stages are not filled yet.
"""

from __future__ import annotations

from time import monotonic

from pipecompile.partitioners.bounds.stage_windows import StageWindows
from pipecompile.partitioners.clusters import Clusters, transitive_reduction
from pipecompile.partitioners.ilp.consumer_counts import ConsumerCounts
from pipecompile.partitioners.ilp.one_stage import StageModel, build_stage_model
from pipecompile.partitioners.ilp.solver_backend import LinearExpr
from pipecompile.partitioners.machine import Machine

__all__ = ["fill_stages"]

GAP = 0.001
"""Absolute gap to which the program of a stage is solved, as a fraction of the target."""


def fill_stages(
    clusters: Clusters,
    machine: Machine,
    windows: StageWindows,
    target: float,
    seconds: float,
    deadline: float,
    *,
    forwards: bool,
) -> list[int] | None:
    """Return the stage of every cluster, within the windows, or None. The program of each stage runs for `seconds`.

    The result may exceed the target: different link factors, several consumers and boundary buffers are left to the caller,
    who evaluates the cut.
    """
    if not machine.is_one_to_one:
        return None
    windows, arcs, last_stage = windows.copy(), transitive_reduction(clusters), len(machine) - 1
    for s in range(last_stage) if forwards else range(last_stage, 0, -1):
        boundary = s if forwards else s - 1
        model = build_stage_model(clusters, machine, ConsumerCounts(clusters, windows), arcs, target, s)
        objective = _remaining_work(model, clusters, machine, boundary, target, forwards=forwards)
        result = model.mip.minimise(objective, min(seconds, deadline - monotonic()), gap=GAP)
        if result.is_interrupted:
            raise KeyboardInterrupt
        if result.values is None:
            return None
        for v in range(len(clusters)):
            if model.steps.at_most(v, boundary).evaluate(result.values) > 0.5:
                windows.latest[v] = min(windows.latest[v], boundary)
            else:
                windows.earliest[v] = max(windows.earliest[v], boundary + 1)
        windows.propagate()
        if windows.is_empty:
            return None
    return [int(s) for s in windows.earliest]


def _remaining_work(
    model: StageModel, clusters: Clusters, machine: Machine, boundary: int, target: float, *, forwards: bool
) -> LinearExpr:
    """Return the load that remains beyond a boundary, as a fraction of the target: work and crossing tensors."""
    remaining = model.work[boundary] * (-1.0 if forwards else 1.0)
    time_factor = 0.0 if machine.overlap else machine.min_link_factor * min(machine.speed) / target
    for flow in clusters.flows if time_factor else ():
        low, high = min(flow.source, flow.consumers[0]), max(flow.source, flow.consumers[-1])
        crosses = model.mip.add_maximum([model.steps.at_most(low, boundary) - model.steps.at_most(high, boundary)])
        remaining.add(crosses, flow.time * time_factor)
    return remaining
