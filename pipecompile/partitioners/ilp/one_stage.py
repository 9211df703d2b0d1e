"""The program of one stage by itself, below a target: the steps of its two boundaries, its load and its memory.

    work   0 ───────── boundary s - 1 ───────── boundary s ───────── all
                            J        stage s        I            J and I: all that is in stages up to the boundary

What other stages do is left open, so every cut below the target has its stage s among the solutions. It is small: clusters
that windows keep out of stages s - 1, s and s + 1 are numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from pipecompile.partitioners.clusters import Clusters
from pipecompile.partitioners.ilp.consumer_counts import Readers
from pipecompile.partitioners.ilp.solver_backend import Linear, Mip
from pipecompile.partitioners.ilp.step_variables import Steps
from pipecompile.partitioners.ilp.traffic_rows import arrival, departure
from pipecompile.partitioners.machine import Stages

__all__ = ["SLACK", "Single", "single"]

SLACK = 1e-6
"""By how much the solver may be off, as a share of the target."""


@dataclass(frozen=True, slots=True)
class Single:
    """A program, its steps, and the work up to each boundary of the stage, as a share of the target."""

    mip: Mip
    steps: Steps
    work: dict[int, Linear]


def single(
    clusters: Clusters, stages: Stages, readers: Readers, arcs: list[tuple[int, int]], target: float, s: int
) -> Single:
    """Stage s below the target."""
    mip, windows = Mip(), readers.windows
    steps = Steps(mip, windows.first.tolist(), windows.last.tolist())
    here = [v for v in range(len(clusters)) if steps.may_be(v, s)]
    steps.rise(here, range(s - 1, s + 1))
    steps.order(arcs, windows.apart, range(s - 1, s + 1))
    _load(steps, readers, clusters, stages, here, s, target)
    _memory(mip, steps, clusters, stages, here, s)
    work = {b: _work(steps, clusters, here, b, target) for b in (s - 1, s) if 0 <= b < len(stages) - 1}
    for b, amount in work.items():
        mip.require(amount, windows.least[b] / target - SLACK)
        mip.require(windows.most[b] / target + SLACK, amount)
    return Single(mip, steps, work)


def _load(
    steps: Steps, readers: Readers, clusters: Clusters, stages: Stages, here: list[int], s: int, target: float
) -> None:
    """The stage stays below the target, at the least price that its links can have."""
    compute, sent, received = Linear(), Linear(), Linear()
    again = stages.recompute[s] is True
    for v in here:
        time = clusters.time[v] + (clusters.forward[v] if again else 0.0)
        compute.add(steps.inside(v, s), time / stages.speed[s] / target)
    price = stages.cheapest / target
    for number, flow in enumerate(clusters.flows if price else ()):
        if steps.may_be(flow.source, s):
            copies = 1 if stages.multicast else readers.fewest(number, flow, s)
            sent.add(departure(steps, flow, s, copies), flow.time * price)
        if any(steps.may_be(consumer, s) for consumer in flow.consumers):
            received.add(arrival(steps, readers, number, flow, s), flow.time * price)
    for load in (compute, sent, received) if stages.overlap else (compute.add(sent).add(received),):
        steps.mip.require(1.0, load)


def _memory(mip: Mip, steps: Steps, clusters: Clusters, stages: Stages, here: list[int], s: int) -> None:
    """What the stage holds at least: boundary buffers and shared bytes are not looked at."""
    if not 0 < stages.limit[s] < inf:
        return
    flying = stages.in_flight[s] if stages.recompute[s] is False else min(stages.in_flight[s], 1.0)
    held = Linear()
    for v in here:
        held.add(steps.inside(v, s), (clusters.bytes[v] + flying * clusters.activation[v]) / stages.limit[s])
    mip.require(1.0 + SLACK, held)


def _work(steps: Steps, clusters: Clusters, here: list[int], boundary: int, target: float) -> Linear:
    """The work of all stages up to a boundary."""
    inside = set(here)
    done = (clusters.time[v] for v, last in enumerate(steps.last) if v not in inside and last <= boundary)
    work = Linear(sum(done) / target)
    for v in here:
        work.add(steps.below(v, boundary), clusters.time[v] / target)
    return work
