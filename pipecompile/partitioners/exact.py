"""Bound and cut brought together: the least bottleneck below a target, for targets from the bound upwards.

    bound ──┬────────────┬──────────────┬───────────── cut
            refuted      refuted        found, proven best

A low target is easy to refute: contraction, windows and frontiers leave little or nothing to the integer program. What is refuted
is a bound. The first target that is not gives the best cut there is, since the program minimises. So the cut at hand is
tried first, as it often is the best; then targets from below, by bisection as long as frontiers alone refute them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import monotonic

from pipecompile.partitioners.anchors import anchor_bound
from pipecompile.partitioners.clusters import Clusters
from pipecompile.partitioners.contraction import contract
from pipecompile.partitioners.frontiers import tighten
from pipecompile.partitioners.loads import Ledger, fits
from pipecompile.partitioners.mip import Linear
from pipecompile.partitioners.model import Model, model
from pipecompile.partitioners.search import Search
from pipecompile.partitioners.windows import Windows, windows

__all__ = ["close"]

EASY = 300
"""Open steps up to which the program of the best cut is solved at once."""

CLOSE = 0.003
"""Relative distance of bound and cut below which targets are no longer halved."""

LARGEST = 100_000
"""Step variables beyond which no program is built: writing it down alone would take minutes."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """What is left of the problem below a target."""

    target: float
    clusters: Clusters
    windows: Windows


def close(search: Search) -> None:
    """Bring bound and cut together, or as close as the deadline lets."""
    if search.stage is None or search.value == 0:
        return
    search.enter("windows")
    attempt = _below(search, search.target)
    if attempt is not None and attempt.windows.n_steps > EASY:
        search.prove(anchor_bound(attempt.clusters, search.stages, search.target, search.deadline), "ilp")
    if search.open and attempt is not None and attempt.windows.n_steps <= EASY:
        _solve(search, attempt, search.left)
    _bisect(search)
    step = CLOSE
    while search.open and search.left > 0:
        target = min(search.target, search.bound * (1 + step) if search.bound else search.target)
        attempt = _below(search, target)
        if attempt is None:
            continue
        if attempt.windows.n_steps > LARGEST:
            return
        _solve(search, attempt, search.left if target >= search.target else max(search.left / 3, 2.0))
        step = step * 2 if search.bound < target else step


def _bisect(search: Search) -> None:
    """Raise the bound by halves, as far as windows and frontiers refute."""
    unproven = search.target
    while search.open and search.left > 0 and unproven - search.bound > CLOSE * unproven:
        middle = (search.bound + unproven) / 2
        if _below(search, middle) is not None:
            unproven = middle


def _below(search: Search, target: float) -> Attempt | None:
    """What is left below the target; None when it is refuted, and so a bound."""
    clusters = contract(search.clusters, search.stages, target)
    left = windows(clusters, search.stages, target)
    if not left.empty:
        tighten(clusters, search.stages, left, target, search.deadline)
    if left.empty:
        search.prove(target, method="ilp")
        return None
    return Attempt(target, clusters, left)


def _solve(search: Search, attempt: Attempt, seconds: float) -> None:
    """Run the integer program below a target: offer what it finds, prove what it proves."""
    search.enter("program")
    clusters, stages, target = attempt.clusters, search.stages, attempt.target
    made = model(clusters, stages, attempt.windows, target, search.bound)
    end = min(monotonic() + seconds, search.deadline)
    while True:
        watch = lambda value, bound: search.tell(value * target, bound * target)  # noqa: E731
        outcome = made.mip.minimise(made.bottleneck, end - monotonic(), watch=watch)
        if outcome.values is None:
            break
        stage = made.steps.stages(outcome.values)
        search.offer(stage, clusters, "ilp")
        if outcome.interrupted:
            raise KeyboardInterrupt
        if not _forbid(made, search, clusters, stage) or monotonic() > end:
            break
    search.prove(min(outcome.bound, 1.0) * target, method="ilp")


def _forbid(made: Model, search: Search, clusters: Clusters, stage: Sequence[int]) -> bool:
    """Forbid an assignment that fits in memory only within the solver's tolerance. Whether that was needed."""
    rows = Ledger(clusters, search.stages, stage).rows()
    if all(fits(row.memory, limit) for row, limit in zip(rows, search.stages.limit, strict=True)):
        return False
    same = Linear()
    for v, s in enumerate(stage):
        same.add(made.steps.inside(v, s))
    made.mip.require(len(stage) - 1.0, same)
    return True
