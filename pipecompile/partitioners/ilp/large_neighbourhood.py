"""Better cuts from a cut: a few neighbouring stages at a time are cut anew, by the integer program, and all others stay.

    stage    0        1        2        3        4
           [a b]    [c d]    [e f]    [g h]     [i]       3 is the fullest: c to f, e to h or g to i are dealt out again
           fixed    fixed  ╰──── free ────╯    fixed

What stays is melted into one cluster per stage, so the program is as small as the stages that are free. One that has no solution below
the bottleneck proves that no other deal of these stages helps; when no window of so many stages does, a wider one is tried.
"""

from __future__ import annotations

from collections.abc import Iterator
from time import monotonic

import numpy as np

from pipecompile.partitioners.bounds.contraction import contract
from pipecompile.partitioners.bounds.stage_windows import windows
from pipecompile.partitioners.clusters import merge
from pipecompile.partitioners.ilp.formulation import model
from pipecompile.partitioners.incumbent import Search
from pipecompile.partitioners.objective import Ledger

__all__ = ["redeal"]

SECONDS = 3.0
"""How long the program of one window is run."""


def redeal(search: Search, widest: int, deadline: float) -> None:
    """Improve the best cut until no window of up to so many stages does, or time is over."""
    search.enter("neighbourhood")
    width = 2
    while search.open and width <= min(widest, len(search.stages)) and monotonic() < deadline:
        if not any(_dealt(search, first, first + width - 1, deadline) for first in _around_fullest(search, width)):
            width += 1


def _around_fullest(search: Search, width: int) -> Iterator[int]:
    """Where windows of so many stages begin that hold the fullest device, the emptiest first."""
    ledger = Ledger(search.clusters, search.stages, search.stage or [])
    loads = [ledger.load(d) for d in range(len(search.stages.speed))]
    fullest = set(search.stages.on(int(np.argmax(loads))))
    begins = [first for first in range(len(search.stages) - width + 1) if fullest & set(range(first, first + width))]
    return iter(sorted(begins, key=lambda first: sum(loads[d] for d in search.stages.device[first : first + width])))


def _dealt(search: Search, first: int, last: int, deadline: float) -> bool:
    """Whether the clusters of the stages first to last can be dealt out better."""
    if monotonic() > deadline or search.stage is None:
        return False
    fixed: dict[int, list[int]] = {}
    for v, s in enumerate(search.stage):
        if not first <= s <= last:
            fixed.setdefault(s, []).append(v)
    melted = contract(merge(search.clusters, fixed.values()), search.stages, search.target)
    left = windows(melted, search.stages, search.target)
    now = {name: s for names, s in zip(search.clusters.members, search.stage, strict=True) for name in names}
    for v, names in enumerate(melted.members):
        s = now[names[0]]
        low, high = (first, last) if first <= s <= last else (s, s)
        left.first[v], left.last[v] = max(left.first[v], low), min(left.last[v], high)
    left.shrink()
    if left.empty:
        return False
    made = model(melted, search.stages, left, search.target)
    outcome = made.mip.minimise(made.bottleneck, min(SECONDS, deadline - monotonic()))
    better = outcome.values is not None and search.offer(made.steps.stages(outcome.values), melted, "ilp")
    if outcome.interrupted:
        raise KeyboardInterrupt
    return better
