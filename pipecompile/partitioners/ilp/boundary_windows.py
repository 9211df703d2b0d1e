"""Bound tightening: bounds of the cumulative work at every boundary below a target, by linear programs of single stages.

    work   0 ─────────[min ═ max]──────────[min ═ max]────────── all
                     boundary s - 1    stage s   boundary s

The relaxed program of stage s (one_stage.py), with the step variables of its two boundaries, gives the most work before the
end of the stage and the least before its begin, with all that the stage must send and receive. Sweeps over the stages, forth
and back, shrink the windows of all clusters, which makes the next sweep sharper. This is optimisation-based bound tightening
of the integer program. Often a window closes: then the target is refuted. Otherwise the integer program of all stages keeps
about a tenth of its step variables.
"""

from __future__ import annotations

from math import inf
from time import monotonic

from pipecompile.partitioners.bounds.stage_windows import StageWindows
from pipecompile.partitioners.clusters import Clusters, transitive_reduction
from pipecompile.partitioners.ilp.consumer_counts import ConsumerCounts
from pipecompile.partitioners.ilp.one_stage import SOLVER_TOLERANCE, build_stage_model
from pipecompile.partitioners.machine import Machine

__all__ = ["tighten_windows"]

MIN_OPEN_STEPS = 40
"""Open step variables up to which a sweep costs more than it saves."""

MIN_PROGRESS = 0.95
"""A sweep that leaves more than this fraction of the step variables open is the last."""


def tighten_windows(
    clusters: Clusters, machine: Machine, windows: StageWindows, target: float, deadline: float
) -> None:
    """Shrink the windows in place by linear programs. They become empty if no cut is below the target."""
    if not machine.is_one_to_one:
        return
    arcs, counts = transitive_reduction(clusters), ConsumerCounts(clusters, windows)
    n_before, solved = inf, dict[int, bytes]()
    while not windows.is_empty and MIN_OPEN_STEPS < windows.n_open_steps < MIN_PROGRESS * n_before:
        n_before = windows.n_open_steps
        for s in (*range(len(machine)), *reversed(range(len(machine) - 1))):
            if solved.get(s) == (inputs := _inputs_of_stage(windows, s)):
                continue
            solved[s] = inputs
            model = build_stage_model(clusters, machine, counts, arcs, target, s)
            objectives = [amount * (-1.0 if b == s else 1.0) for b, amount in model.work.items()]
            bounds = model.mip.minimise_relaxed(objectives, deadline - monotonic())
            for b, bound in zip(model.work, bounds, strict=True):
                _apply(windows, b, bound, target, is_end=b == s)
            if windows.is_empty or monotonic() > deadline:
                return


def _apply(windows: StageWindows, boundary: int, bound: float, target: float, *, is_end: bool) -> None:
    """Bound the work at the end (at most) or the begin (at least) of a stage. An infinite bound empties the windows."""
    if bound == inf:
        windows.latest[:] = -1
    elif is_end:
        windows.bound_work(boundary, at_most=(SOLVER_TOLERANCE - bound) * target)
    else:
        windows.bound_work(boundary, at_least=(bound - SOLVER_TOLERANCE) * target)


def _inputs_of_stage(windows: StageWindows, s: int) -> bytes:
    """Return a key of all that the program of a stage depends on."""
    work = [windows.min_work[max(s - 1, 0) : s + 1], windows.max_work[max(s - 1, 0) : s + 1]]
    stages = [windows.earliest.clip(s - 1, s + 1), windows.latest.clip(s - 1, s + 1)]
    return b"".join(column.tobytes() for column in (*work, *stages))
