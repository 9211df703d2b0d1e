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

from pipecompile.partitioners.bounds.reachability import skeleton
from pipecompile.partitioners.bounds.stage_windows import Windows
from pipecompile.partitioners.clusters import Clusters
from pipecompile.partitioners.ilp.consumer_counts import Readers
from pipecompile.partitioners.ilp.one_stage import SLACK, single
from pipecompile.partitioners.machine import Stages

__all__ = ["tighten"]

FEW = 40
"""Open steps at which a sweep costs more than it saves."""

ENOUGH = 0.95
"""A sweep that leaves more than this share of the steps open is the last."""


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
