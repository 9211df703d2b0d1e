"""Large neighbourhood search: reassign the clusters of a few consecutive stages by the integer program, fix all others.

    stage    0        1        2        3        4
           [a b]    [c d]    [e f]    [g h]     [i]       3 has the largest load: c to f, e to h or g to i are reassigned
           fixed    fixed  ╰──── free ────╯    fixed

Fixed clusters are merged into one per stage, so the program is as small as the free stages. If it has no solution below the
bottleneck, no assignment of these stages improves the cut. If none of a width does, wider neighbourhoods are tried.
"""

from __future__ import annotations

from collections.abc import Iterator
from time import monotonic

import numpy as np

from pipecompile.partitioners.bounds.separations import contract
from pipecompile.partitioners.bounds.stage_windows import compute_windows
from pipecompile.partitioners.clusters import merge
from pipecompile.partitioners.ilp.formulation import build_model
from pipecompile.partitioners.ilp.solver_backend import OutOfTimeError
from pipecompile.partitioners.incumbent import SolverState
from pipecompile.partitioners.objective import LoadTracker

__all__ = ["improve_by_neighbourhoods"]

SECONDS = 3.0
"""Seconds for the program of one neighbourhood."""


def improve_by_neighbourhoods(state: SolverState, max_width: int, deadline: float) -> None:
    """Improve the incumbent until no neighbourhood of up to `max_width` stages does, or the deadline has passed."""
    state.enter("neighbourhood")
    width = 2
    while state.has_gap and width <= min(max_width, len(state.machine)) and monotonic() < deadline:
        if not any(_reassign(state, first, first + width - 1, deadline) for first in _first_stages(state, width)):
            width += 1


def _first_stages(state: SolverState, width: int) -> Iterator[int]:
    """Yield the first stages of neighbourhoods with a stage of the bottleneck device, those of least load first."""
    tracker = LoadTracker(state.clusters, state.machine, state.assignment or [])
    loads = [tracker.load(d) for d in range(len(state.machine.speed))]
    critical = set(state.machine.stages_on(int(np.argmax(loads))))
    firsts = [first for first in range(len(state.machine) - width + 1) if critical & set(range(first, first + width))]
    return iter(sorted(firsts, key=lambda first: sum(loads[d] for d in state.machine.device_of[first : first + width])))


def _reassign(state: SolverState, first: int, last: int, deadline: float) -> bool:
    """Reassign the clusters of the stages `first` to `last`. Return whether this improves the incumbent."""
    if monotonic() > deadline or state.assignment is None:
        return False
    fixed: dict[int, list[int]] = {}
    for v, s in enumerate(state.assignment):
        if not first <= s <= last:
            fixed.setdefault(s, []).append(v)
    merged = contract(merge(state.clusters, fixed.values()), state.machine, state.target)
    windows = compute_windows(merged, state.machine, state.target, deadline)
    stage_of = {name: s for names, s in zip(state.clusters.members, state.assignment, strict=True) for name in names}
    for v, names in enumerate(merged.members):
        s = stage_of[names[0]]
        low, high = (first, last) if first <= s <= last else (s, s)
        windows.earliest[v], windows.latest[v] = max(windows.earliest[v], low), min(windows.latest[v], high)
    windows.propagate()
    if windows.is_empty:
        return False
    try:
        model = build_model(merged, state.machine, windows, state.target, deadline=deadline)
    except OutOfTimeError:
        return False
    result = model.mip.minimise(model.bottleneck, min(SECONDS, deadline - monotonic()))
    improved = result.values is not None and state.offer(model.steps.assignment(result.values), merged, "ilp")
    if result.is_interrupted:
        raise KeyboardInterrupt
    return improved
