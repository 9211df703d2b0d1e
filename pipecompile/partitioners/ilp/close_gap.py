"""Bound and cut brought together: the least bottleneck below a target, for targets from the bound upwards.

    bound ──┬────────────┬──────────────┬───────────── cut
            refuted      refuted        found, proven best

A low target is easy to refute: contraction, windows and frontiers leave little or nothing to the integer program. What is refuted
is a bound. The first target that is not gives the best cut there is, since the program minimises. So the cut at hand is
tried first, as it often is the best. Then stages are filled for a better one, and targets between bound and cut are tried, with more
effort as soon as none is refuted with less.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from time import monotonic

from pipecompile.partitioners.bounds.contraction import contract
from pipecompile.partitioners.bounds.stage_windows import Windows, windows
from pipecompile.partitioners.clusters import Clusters
from pipecompile.partitioners.dp.down_sets import PAIRS
from pipecompile.partitioners.dp.strategy import sweep
from pipecompile.partitioners.ilp.anchor_bound import anchor_bound
from pipecompile.partitioners.ilp.boundary_windows import tighten
from pipecompile.partitioners.ilp.formulation import Model, model
from pipecompile.partitioners.ilp.greedy_fill import fill
from pipecompile.partitioners.ilp.large_neighbourhood import redeal
from pipecompile.partitioners.ilp.one_stage import SLACK
from pipecompile.partitioners.ilp.solver_backend import Linear
from pipecompile.partitioners.incumbent import Search
from pipecompile.partitioners.objective import Ledger, fits

__all__ = ["close"]

CLOSE = 0.003
"""Relative distance of a target above the bound at which it is not halved again, but worked on."""

STRIDE = 0.5, 0.25
"""How far from the bound to the lowest target that resisted, or the cut, the next one is, without and with effort: nearer to the bound
more is refuted in the time that a program has."""

LARGEST = 100_000
"""Step variables beyond which no program is built: writing it down alone would take minutes."""

EASY = 250
"""Open steps up to which the integer program is run at once. With every level of effort there may be 16 times as many: a target
that is near the bound is often refuted long before a program of that size would be solved."""

SECONDS = 4.0
"""How long it is run then. With every level of effort everything is allowed three times as much."""

SINGLE = 0.1
"""How long the integer program of one stage is run to fill it, before effort."""

FAR = 1.5
"""A bottleneck above so many times the even share is decided by tensors around single clusters: then anchors help."""


@dataclass(slots=True)
class Attempt:
    """What is left of the problem below a target. The work that it leaves to boundaries bounds that of lower targets too."""

    target: float
    clusters: Clusters
    windows: Windows


def close(search: Search) -> None:
    """Bring bound and cut together, or as close as the deadline lets."""
    if search.stage is None or search.value == 0:
        return
    level, resisted, known = 0, search.target, list[Attempt]()
    if not _settle(search, search.target, level, known) and known:
        _improve(search, known[0])
        if known[0].windows.n_steps > EASY:  # then a better cut comes first
            level = 1
            redeal(search, 3, search.left / 8 + monotonic())
    while search.open and search.left > 0:
        high = min(resisted, search.target)
        is_near = high - search.bound <= CLOSE * high
        target = high if is_near else search.bound + STRIDE[level > 0] * (high - search.bound)
        if is_near and resisted == high:
            level, resisted = level + 1, inf
            if level > 1:
                _lower(search, level, known)
            redeal(search, level + 2, search.left / 8 + monotonic())
        elif not _settle(search, target, level, known):
            resisted = target


def _improve(search: Search, attempt: Attempt) -> None:
    """What helps when the cut at hand is not proven at once: a better cut, and a bound where tensors decide."""
    if search.value > FAR * search.bound:
        search.prove(anchor_bound(attempt.clusters, search.stages, search.target, search.deadline), "ilp")
    redeal(search, 2, search.left / 6 + monotonic())
    _lower(search, 1, [attempt])


def _lower(search: Search, level: int, known: list[Attempt]) -> None:
    """Fill the stages below targets between bound and cut, until they are close together."""
    _narrow(search, known)
    low, seconds = search.bound, 3**level * SINGLE
    while search.left > 0 and search.value - low > 2 * CLOSE * search.value / level:
        target = search.value - (search.value - low) / 3
        attempt = _below(search, target, known)
        if attempt is None or not any(_filled(search, attempt, seconds, forwards=side) for side in (False, True)):
            low = target


def _narrow(search: Search, known: Sequence[Attempt]) -> None:
    """Refute what windows alone refute."""
    high = search.target
    while search.left > 0 and high - search.bound > CLOSE * high:
        target = (search.bound + high) / 2
        if _below(search, target, known) is not None:
            high = target


def _filled(search: Search, attempt: Attempt, seconds: float, *, forwards: bool) -> bool:
    """Whether filling stages gives a cut below the target."""
    search.enter("filling")
    clusters, left, target = attempt.clusters, attempt.windows, attempt.target
    stage = fill(clusters, search.stages, left, target, seconds, search.deadline, forwards=forwards)
    return stage is not None and search.offer(stage, clusters, "ilp") and search.value <= target


def _below(search: Search, target: float, known: Sequence[Attempt]) -> Attempt | None:
    """What is left below the target; None when it is refuted, and so a bound."""
    search.enter("windows")
    clusters = contract(search.clusters, search.stages, target)
    left = windows(clusters, search.stages, target)
    for attempt in known:
        if attempt.target >= target:
            left.narrow(attempt.windows)
    if not left.empty:
        tighten(clusters, search.stages, left, target, search.deadline)
    if left.empty:
        search.prove(target, method="ilp")
        return None
    return Attempt(target, clusters, left)


def _settle(search: Search, target: float, level: int, known: list[Attempt]) -> bool:
    """Work on a target with some effort: windows, the lattice, then the integer program.
    Whether that settles it: the cut is proven best, or the target is a bound.
    """
    attempt = _below(search, target, known)
    if attempt is None:
        return True
    known.append(attempt)
    effort, clusters, left = 3**level, attempt.clusters, attempt.windows
    search.enter("lattice")
    sweep(search, target, clusters, left, 20 * effort * PAIRS)
    if not _settled(search, target) and left.n_steps <= min(EASY * 16**level, LARGEST) and search.left > 0:
        _run(search, attempt, min(effort * SECONDS, search.left))
    return _settled(search, target)


def _settled(search: Search, target: float) -> bool:
    return not search.open or search.bound >= target


def _run(search: Search, attempt: Attempt, seconds: float) -> None:
    """Run the integer program below a target: offer what it finds, prove what it proves."""
    search.enter("program")
    clusters, stages, target, end = attempt.clusters, search.stages, attempt.target, monotonic() + seconds
    made = model(clusters, stages, attempt.windows, target, search.bound)
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
