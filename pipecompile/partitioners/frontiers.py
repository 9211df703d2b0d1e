"""Narrower windows: between which bounds the work before each boundary lies, if the bottleneck is to stay below a target.

    work   0 ─────────[least ═ most]──────────[least ═ most]────────── all
                     boundary s - 1    stage s   boundary s

A linear program of stage s alone, with the steps of its two boundaries, says how far to the right the stage can end, and how
far to the left it can begin, with all that it must send and receive. Swept over the stages, there and back, these programs
are small, and what they prove shrinks the windows of all clusters, which makes the next sweep sharper. Often a window
closes: then nothing stays below the target. Otherwise the integer program of all stages is left with a tenth of its steps.
"""

from __future__ import annotations

from math import inf
from time import monotonic

from pipecompile.partitioners.clusters import Clusters
from pipecompile.partitioners.mip import Linear, Mip
from pipecompile.partitioners.reach import skeleton
from pipecompile.partitioners.readers import Readers
from pipecompile.partitioners.stages import Stages
from pipecompile.partitioners.steps import Steps
from pipecompile.partitioners.traffic import arrival, departure
from pipecompile.partitioners.windows import Windows

__all__ = ["SLACK", "push", "tighten"]

FEW = 40
"""Open steps at which a sweep costs more than it saves."""

ENOUGH = 0.95
"""A sweep that leaves more than this share of the steps open is the last."""

ROUGH = 0.005
"""To what share of the target an integer program of one stage is solved."""

SLACK = 1e-6
"""By how much the solver may be off, as a share of the target."""


def tighten(clusters: Clusters, stages: Stages, windows: Windows, target: float, deadline: float) -> None:
    """Shrink the windows in place, by linear programs. They are empty when it is proven that no cut stays below the target."""
    if not stages.direct:
        return
    arcs, readers, before, seen = skeleton(clusters), Readers(clusters, windows), inf, dict[int, bytes]()
    while not windows.empty and FEW < windows.n_steps < ENOUGH * before:
        before = windows.n_steps
        for s in (*range(len(stages)), *reversed(range(len(stages) - 1))):
            if seen.get(s) == (view := _view(windows, s)):
                continue
            seen[s] = view
            mip, work = _program(clusters, stages, readers, arcs, target, s)
            goals = [amount * (-1.0 if b == s else 1.0) for b, amount in work.items()]
            for b, end in zip(work, mip.minimise_each(goals, deadline - monotonic()), strict=True):
                _note(windows, b, end, target, right=b == s)
            if windows.empty or monotonic() > deadline:
                return


def push(clusters: Clusters, stages: Stages, windows: Windows, target: float, seconds: float, deadline: float) -> None:
    """The same by integer programs, each of so many seconds: the right ends from left to right, the left ends back again."""
    arcs, readers = skeleton(clusters), Readers(clusters, windows)
    ends = [*((s, s) for s in range(len(stages))), *((s, s - 1) for s in reversed(range(len(stages))))]
    for s, b in ends if stages.direct else ():
        mip, work = _program(clusters, stages, readers, arcs, target, s)
        goal = work[b] * (-1.0 if b == s else 1.0) if b in work else Linear()
        outcome = mip.minimise(goal, min(seconds, deadline - monotonic()), gap=ROUGH)
        if outcome.interrupted:
            raise KeyboardInterrupt
        if b in work or outcome.bound == inf:
            _note(windows, b, outcome.bound, target, right=b == s)
        if windows.empty or monotonic() > deadline:
            return


def _note(windows: Windows, boundary: int, bound: float, target: float, *, right: bool) -> None:
    """A right end is at most, a left end at least so far; an infinite bound says that the stage cannot be at all."""
    if bound == inf:
        windows.last[:] = -1
    elif right:
        windows.bound(boundary, most=(SLACK - bound) * target)
    else:
        windows.bound(boundary, least=(bound - SLACK) * target)


def _view(windows: Windows, s: int) -> bytes:
    """All that the program of a stage depends on."""
    bounds = [windows.least[max(s - 1, 0) : s + 1], windows.most[max(s - 1, 0) : s + 1]]
    ends = [windows.first.clip(s - 1, s + 1), windows.last.clip(s - 1, s + 1)]
    return b"".join(column.tobytes() for column in (*bounds, *ends))


def _program(
    clusters: Clusters, stages: Stages, readers: Readers, arcs: list[tuple[int, int]], target: float, s: int
) -> tuple[Mip, dict[int, Linear]]:
    """Stage s below the target, and the work up to each of its boundaries."""
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
    return mip, work


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
