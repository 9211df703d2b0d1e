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
from pipecompile.partitioners.mip import Linear
from pipecompile.partitioners.reach import skeleton
from pipecompile.partitioners.readers import Readers
from pipecompile.partitioners.single import SLACK, single
from pipecompile.partitioners.stages import Stages
from pipecompile.partitioners.windows import Windows

__all__ = ["push", "tighten"]

FEW = 40
"""Open steps at which a sweep costs more than it saves."""

ENOUGH = 0.95
"""A sweep that leaves more than this share of the steps open is the last."""

PATIENCE = 2
"""How many slices may resist before an end is left where it is."""


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
            alone = single(clusters, stages, readers, arcs, target, s)
            goals = [amount * (-1.0 if b == s else 1.0) for b, amount in alone.work.items()]
            for b, end in zip(alone.work, alone.mip.minimise_each(goals, deadline - monotonic()), strict=True):
                _note(windows, b, end, target, right=b == s)
            if windows.empty or monotonic() > deadline:
                return


def push(clusters: Clusters, stages: Stages, windows: Windows, target: float, seconds: float, deadline: float) -> None:
    """The same by integer programs, each of so many seconds: the right ends from left to right, the left ends back again.

        least ├──────────────────────┬─────┤ most       no stage s ends in this slice: so the end is further left

    That nothing is in a slice is shown faster than where the end is: a slice leaves most steps no choice.
    """
    if not stages.direct:
        return
    arcs, last = skeleton(clusters), len(stages) - 1
    for s, right in (*((s, True) for s in range(last)), *((s, False) for s in range(last, 0, -1))):
        _push_end(clusters, stages, windows, arcs, target, s, seconds, deadline, right=right)
        if windows.empty or monotonic() > deadline:
            return


def _push_end(
    clusters: Clusters, stages: Stages, windows: Windows, arcs: list[tuple[int, int]], target: float, s: int,
    seconds: float, deadline: float, *, right: bool,
) -> None:  # fmt: skip
    """Push one end of stage s, by slices that grow until one of them resists."""
    b = s if right else s - 1
    step, resisted, beyond = (windows.most[b] - windows.least[b]) / 4, 0, SLACK * target
    while resisted < PATIENCE and monotonic() < deadline:
        least, most = windows.least[b], windows.most[b]
        step = min(step, most - least)
        part = windows.copy()
        part.bound(b, least=most - step if right else least, most=most if right else least + step)
        if not part.empty and _possible(clusters, stages, part, arcs, target, s, min(seconds, deadline - monotonic())):
            resisted, step = resisted + 1, step / 4
            continue
        if step >= most - least:
            windows.last[:] = -1
            return
        if step <= 2 * beyond:
            return
        if right:
            windows.bound(b, most=most - step + beyond)
        else:
            windows.bound(b, least=least + step - beyond)
        step *= 1 if resisted else 2


def _possible(
    clusters: Clusters,
    stages: Stages,
    part: Windows,
    arcs: list[tuple[int, int]],
    target: float,
    s: int,
    seconds: float,
) -> bool:
    """Whether stage s can be within these windows, as far as so many seconds tell."""
    outcome = single(clusters, stages, Readers(clusters, part), arcs, target, s).mip.minimise(Linear(), seconds)
    if outcome.interrupted:
        raise KeyboardInterrupt
    return not (outcome.done and outcome.bound == inf)


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
