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
from pipecompile.partitioners.dp import sweep
from pipecompile.partitioners.frontiers import SLACK, tighten
from pipecompile.partitioners.lattice import PAIRS
from pipecompile.partitioners.loads import Ledger, fits
from pipecompile.partitioners.mip import Linear
from pipecompile.partitioners.model import Model, model
from pipecompile.partitioners.search import Search
from pipecompile.partitioners.windows import Windows, windows

__all__ = ["close"]

CLOSE = 0.003
"""Relative distance of a target above the bound at which it is not halved again, but worked on."""

LARGEST = 100_000
"""Step variables beyond which no program is built: writing it down alone would take minutes."""

EASY = 150
"""Open steps per unit of effort up to which the integer program is run."""

SECONDS = 2.0
"""How long it runs per unit of effort."""

GROWTH = 3
"""By how much more is tried when what was tried left the lowest target open."""


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
    waiting: list[Attempt] = []  # targets that are not refuted, the lowest last
    effort = 1
    _try(search, search.target, waiting, effort)
    if search.open and waiting:
        search.prove(anchor_bound(waiting[-1].clusters, search.stages, search.target, search.deadline), "ilp")
    while search.open and search.left > 0:
        waiting = [attempt for attempt in waiting if search.bound < attempt.target <= search.target]
        lowest = waiting[-1].target if waiting else search.target
        if not waiting or lowest - search.bound > CLOSE * lowest:
            _try(search, (search.bound + lowest) / 2 if waiting else lowest, waiting, effort)
        elif not _solve(search, waiting[-1], effort):
            effort *= GROWTH


def _try(search: Search, target: float, waiting: list[Attempt], effort: int) -> None:
    """Refute a target, or work on what is left, or keep that for later."""
    attempt = _below(search, target)
    if attempt is not None and not _solve(search, attempt, effort):
        waiting.append(attempt)


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


def _solve(search: Search, attempt: Attempt, effort: int) -> bool:
    """Cut the lattice or run the integer program below a target, if the effort is enough for it. Whether that settles it."""
    search.enter("lattice")
    sweep(search, attempt.target, attempt.clusters, attempt.windows, min(30 * effort, 300) * PAIRS)
    settled = not search.open or search.bound >= attempt.target
    if not settled and attempt.windows.n_steps <= min(effort * EASY, LARGEST):
        _run(search, attempt, min(effort * SECONDS, search.left))
    return not search.open or search.bound >= attempt.target


def _run(search: Search, attempt: Attempt, seconds: float) -> None:
    """Run the integer program below a target: offer what it finds, prove what it proves."""
    search.enter("program")
    clusters, stages, target = attempt.clusters, search.stages, attempt.target
    made = model(clusters, stages, attempt.windows, target, search.bound)
    end = monotonic() + seconds
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
    # the solver errs by a millionth of the target: too much when that was far above
    slack = 0.0 if 2 * search.value > target else SLACK
    search.prove(min(outcome.bound - slack, 1.0) * target, method="ilp")


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
