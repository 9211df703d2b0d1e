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
from pipecompile.partitioners.frontiers import SLACK, push, tighten
from pipecompile.partitioners.lattice import PAIRS
from pipecompile.partitioners.loads import Ledger, fits
from pipecompile.partitioners.mip import Linear
from pipecompile.partitioners.model import Model, model
from pipecompile.partitioners.neighbourhood import redeal
from pipecompile.partitioners.search import Search
from pipecompile.partitioners.windows import Windows, windows

__all__ = ["close"]

CLOSE = 0.003
"""Relative distance of a target above the bound at which it is not halved again, but worked on."""

LARGEST = 100_000
"""Step variables beyond which no program is built: writing it down alone would take minutes."""

EASY = 250
"""Open steps up to which the integer program is run at once."""

SECONDS = 3.0
"""How long it is run then. With every level of effort everything is allowed three times as much."""

PUSH = 0.7
"""How long the integer program of one stage is run at the first level of effort."""

FAR = 1.5
"""A bottleneck above so many times the even share is decided by tensors around single clusters: then anchors help."""


@dataclass(slots=True)
class Attempt:
    """What is left of the problem below a target, and the level of effort that did not settle it."""

    target: float
    clusters: Clusters
    windows: Windows
    level: int = -1


def close(search: Search) -> None:
    """Bring bound and cut together, or as close as the deadline lets."""
    if search.stage is None or search.value == 0:
        return
    waiting: list[Attempt] = []  # neither refuted nor settled, the lowest target first
    level = 0
    _settle(search, search.target, waiting)
    if search.open and waiting:
        _improve(search, waiting[0])
    while search.open and search.left > 0:
        waiting[:] = [attempt for attempt in waiting if search.bound < attempt.target <= search.target]
        lowest = waiting[0].target if waiting else search.target
        fresh = [attempt for attempt in waiting if attempt.level < level]
        if not waiting or lowest - search.bound > CLOSE * lowest:
            _settle(search, (search.bound + lowest) / 2 if waiting else lowest, waiting)
        elif not fresh:
            level += 1
            redeal(search, level + 2, search.left / 4 + monotonic())
        else:
            middle = len(fresh) // 2
            if not _work(search, fresh[middle], level):
                for attempt in fresh[middle:]:
                    attempt.level = level


def _settle(search: Search, target: float, waiting: list[Attempt]) -> None:
    """Refute a target, or settle what is left with little effort, or let it wait."""
    search.enter("windows")
    attempt = _below(search, target)
    if attempt is not None and not _work(search, attempt, 0):
        waiting.insert(0, attempt)
        waiting.sort(key=lambda attempt: attempt.target)


def _improve(search: Search, attempt: Attempt) -> None:
    """What helps when the cut at hand is not proven at once: a better cut, and a bound where tensors decide."""
    if search.value > FAR * search.bound:
        search.prove(anchor_bound(attempt.clusters, search.stages, search.target, search.deadline), "ilp")
    redeal(search, 2, search.left / 6 + monotonic())


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


def _work(search: Search, attempt: Attempt, level: int) -> bool:
    """Work on a target with some effort: the lattice, the integer program, then that of every single stage and both again.
    Whether that settles it: the cut is proven best, or the target is a bound.
    """
    attempt.level = level
    effort = 3**level
    for again in (False, True):
        search.enter("lattice")
        sweep(search, attempt.target, attempt.clusters, attempt.windows, 20 * effort * PAIRS)
        if _settled(search, attempt):
            return True
        if attempt.windows.n_steps <= (LARGEST if level else EASY):
            _run(search, attempt, min(effort * SECONDS, search.left))
        if _settled(search, attempt) or not level or again:
            break
        search.enter("windows")
        push(attempt.clusters, search.stages, attempt.windows, attempt.target, effort * PUSH, search.deadline)
        tighten(attempt.clusters, search.stages, attempt.windows, attempt.target, search.deadline)
        if attempt.windows.empty:
            search.prove(attempt.target, method="ilp")
    return _settled(search, attempt)


def _settled(search: Search, attempt: Attempt) -> bool:
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
