"""Narrower windows: between which bounds the work before each boundary lies, if the bottleneck is to stay below a target.

    work   0 ─────────[least ═ most]──────────[least ═ most]────────── all
                     boundary s - 1    stage s   boundary s

A linear program of stage s alone, with the steps of its two boundaries, says how far that stage can reach to the right,
given how far its left end can be, with all that it must send and receive. Swept over the stages from left to right, and back from
right to left, these programs are small, and what they prove shrinks the windows of all clusters, which makes the next
sweep sharper. Often a window closes: then nothing stays below the target. Otherwise the integer program of all stages is
left with a tenth of its steps.
"""

from __future__ import annotations

from time import monotonic

from pipecompile.partitioners.clusters import Clusters
from pipecompile.partitioners.mip import Linear, Mip
from pipecompile.partitioners.reach import skeleton
from pipecompile.partitioners.stages import Stages
from pipecompile.partitioners.steps import Steps
from pipecompile.partitioners.traffic import arrival, departure
from pipecompile.partitioners.windows import Windows

__all__ = ["tighten"]

FEW = 40
"""Open steps at which a sweep costs more than it saves."""

ENOUGH = 0.95
"""A sweep that leaves more than this share of the steps open is the last."""

SLACK = 1e-6
"""By how much the solver may be off, as a share of the target."""


def tighten(clusters: Clusters, stages: Stages, windows: Windows, target: float, deadline: float) -> None:
    """Shrink the windows in place. They are empty when it is proven that no cut stays below the target."""
    if not stages.direct:
        return
    arcs, before = skeleton(clusters), 0
    while not windows.empty and windows.n_steps > FEW and windows.n_steps < ENOUGH * (before or 2 * windows.n_steps):
        before = windows.n_steps
        for s in range(len(stages) - 1):
            _reach(clusters, stages, windows, arcs, target, s, forward=True, deadline=deadline)
            if windows.empty or monotonic() > deadline:
                return
        for s in reversed(range(1, len(stages))):
            _reach(clusters, stages, windows, arcs, target, s, forward=False, deadline=deadline)
            if windows.empty or monotonic() > deadline:
                return


def _reach(
    clusters: Clusters, stages: Stages, windows: Windows, arcs: list[tuple[int, int]], target: float, s: int, *,
    forward: bool, deadline: float,
) -> None:  # fmt: skip
    """Push the right end of stage s as far to the right as it goes, or its left end to the left."""
    mip = Mip()
    steps = Steps(mip, windows.first.tolist(), windows.last.tolist())
    here = [v for v in range(len(clusters)) if steps.may_be(v, s)]
    steps.rise(here, range(s - 1, s + 1))
    steps.order(arcs, windows.apart, range(s - 1, s + 1))
    _load(mip, steps, clusters, stages, here, s, target)
    _memory(mip, steps, clusters, stages, here, s)
    work = {b: _work(steps, clusters, here, b, target) for b in (s - 1, s) if 0 <= b < len(stages) - 1}
    for b, amount in work.items():
        mip.require(amount, windows.least[b] / target - SLACK)
        mip.require(windows.most[b] / target + SLACK, amount)
    end = s if forward else s - 1
    outcome = mip.minimise(work[end] * (-1.0 if forward else 1.0), deadline - monotonic(), relaxed=True)
    if outcome.bound == float("inf"):
        windows.last[:] = -1
    elif forward:
        windows.bound(end, most=(SLACK - outcome.bound) * target)
    else:
        windows.bound(end, least=(outcome.bound - SLACK) * target)


def _load(mip: Mip, steps: Steps, clusters: Clusters, stages: Stages, here: list[int], s: int, target: float) -> None:
    """The stage stays below the target, at the least price that its links can have."""
    compute, sent, received = Linear(), Linear(), Linear()
    again = stages.recompute[s] is True
    for v in here:
        time = clusters.time[v] + (clusters.forward[v] if again else 0.0)
        compute.add(steps.inside(v, s), time / stages.speed[s] / target)
    price = stages.cheapest / target
    for flow in clusters.flows if price else ():
        if steps.may_be(flow.source, s):
            sent.add(departure(steps, flow, s), flow.time * price)
        if any(steps.may_be(consumer, s) for consumer in flow.consumers):
            received.add(arrival(steps, flow, s), flow.time * price)
    for load in (compute, sent, received) if stages.overlap else (compute.add(sent).add(received),):
        mip.require(1.0, load)


def _memory(mip: Mip, steps: Steps, clusters: Clusters, stages: Stages, here: list[int], s: int) -> None:
    """What the stage holds at least: boundary buffers and shared bytes are not looked at."""
    if not 0 < stages.limit[s] < float("inf"):
        return
    flying = stages.in_flight[s] if stages.recompute[s] is False else min(stages.in_flight[s], 1.0)
    held = Linear()
    for v in here:
        held.add(steps.inside(v, s), (clusters.bytes[v] + flying * clusters.activation[v]) / stages.limit[s])
    mip.require(1.0 + SLACK, held)


def _work(steps: Steps, clusters: Clusters, here: list[int], boundary: int, target: float) -> Linear:
    """The work of all stages up to a boundary."""
    inside = set(here)
    work = Linear(
        sum(clusters.time[v] for v, last in enumerate(steps.last) if v not in inside and last <= boundary) / target
    )
    for v in here:
        work.add(steps.below(v, boundary), clusters.time[v] / target)
    return work
