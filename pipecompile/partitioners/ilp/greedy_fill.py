"""A cut below a target, one stage after another, each as full as it can be.

    forwards    │ stage 0 ▶│ stage 1 ▶│ ...                    ...│◀ stage k - 2│◀ stage k - 1 │    backwards

The program of one stage says how. What it leaves to the others is the least: the work beyond its end, and what crosses that end.
A stage can be filled so that the next one has no place to end; then the target fails, as it may from the one side and
not from the other. Far stronger than moves from cut to cut, because the stages that come after are not filled yet.
"""

from __future__ import annotations

from time import monotonic

from pipecompile.partitioners.bounds.reachability import skeleton
from pipecompile.partitioners.bounds.stage_windows import Windows
from pipecompile.partitioners.clusters import Clusters
from pipecompile.partitioners.ilp.consumer_counts import Readers
from pipecompile.partitioners.ilp.one_stage import Single, single
from pipecompile.partitioners.ilp.solver_backend import Linear
from pipecompile.partitioners.machine import Stages

__all__ = ["fill"]

ROUGH = 0.001
"""To what share of the target the program of a stage is solved."""


def fill(
    clusters: Clusters, stages: Stages, left: Windows, target: float, seconds: float, deadline: float, *, forwards: bool
) -> list[int] | None:
    """The stage of every cluster, within the windows, or None. The program of a stage is run for so many seconds. Links that
    differ, what several consumers read and boundary buffers are looked at by the caller, who evaluates the cut.
    """
    if not stages.direct:
        return None
    left, arcs, last = left.copy(), skeleton(clusters), len(stages) - 1
    for s in range(last) if forwards else range(last, 0, -1):
        b = s if forwards else s - 1
        made = single(clusters, stages, Readers(clusters, left), arcs, target, s)
        goal = _rest(made, clusters, stages, b, target, forwards=forwards)
        outcome = made.mip.minimise(goal, min(seconds, deadline - monotonic()), gap=ROUGH)
        if outcome.interrupted:
            raise KeyboardInterrupt
        if outcome.values is None:
            return None
        for v in range(len(clusters)):
            if made.steps.below(v, b).value(outcome.values) > 0.5:
                left.last[v] = min(left.last[v], b)
            else:
                left.first[v] = max(left.first[v], b + 1)
        left.shrink()
        if left.empty:
            return None
    return [int(s) for s in left.first]


def _rest(made: Single, clusters: Clusters, stages: Stages, b: int, target: float, *, forwards: bool) -> Linear:
    """What the stages beyond a boundary have to do at least."""
    rest = made.work[b] * (-1.0 if forwards else 1.0)
    price = 0.0 if stages.overlap else stages.cheapest * min(stages.speed) / target
    for flow in clusters.flows if price else ():
        low, high = min(flow.source, flow.consumers[0]), max(flow.source, flow.consumers[-1])
        crosses = made.mip.positive([made.steps.below(low, b) - made.steps.below(high, b)])
        rest.add(crosses, flow.time * price)
    return rest
