"""Fill empty stages: give each a part of another stage's clusters where the bottleneck does not rise.

    [a b] [c d] [e f] [ ]          ──►          [a b] [c d] [e] [f]

Nine equal layers take as long in six stages as in five. With six stages, though, no device idles, and each needs less memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from math import inf
from time import monotonic

from pipecompile.partitioners.clusters import Clusters
from pipecompile.partitioners.machine import Machine
from pipecompile.partitioners.objective import bottleneck

__all__ = ["MAX_SPLITS", "divided", "fill_empty_stages"]

_SLACK = 1 + 1e-9
"""Factor by which the bottleneck may grow: rounding."""

MAX_SPLITS = 32
"""About how many positions are tried at which one stage is divided."""


def fill_empty_stages(
    clusters: Clusters, machine: Machine, assignment: Sequence[int], deadline: float = inf
) -> list[int]:
    """Return the cut with as few empty stages as possible and the same bottleneck. It ends at the deadline, in seconds of `monotonic`.

    O(stages^2) evaluations, none where no stage can be divided.
    """
    best, limit = list(assignment), bottleneck(clusters, machine, assignment) * _SLACK
    while (better := _with_one_filled(clusters, machine, best, limit, deadline)) is not None:
        best = better
    return best


def _with_one_filled(
    clusters: Clusters, machine: Machine, assignment: list[int], limit: float, deadline: float
) -> list[int] | None:
    """Return the assignment with one empty stage fewer, or None if every such assignment exceeds the limit."""
    sizes = Counter(assignment)
    divisible = [stage for stage, size in sizes.items() if size > 1]
    if not divisible:
        return None
    for empty in (s for s in range(len(machine)) if s not in sizes):
        for candidate in divided(assignment, empty, divisible):
            if monotonic() > deadline:
                return None
            pinned = all(candidate[cluster] in pins for cluster, pins in clusters.pins.items())
            if pinned and bottleneck(clusters, machine, candidate) <= limit:
                return candidate
    return None


def divided(
    assignment: list[int], empty: int, divisible: Sequence[int], splits: int = MAX_SPLITS
) -> Iterator[list[int]]:
    """Yield the cuts in which a stage is divided, nearest first; stages between it and the empty one shift by one. About `splits`
    positions are tried in each.
    """
    for divided in sorted(divisible, key=lambda s: (abs(s - empty), s)):
        members = [cluster for cluster, s in enumerate(assignment) if s == divided]
        step = 1 if divided < empty else -1
        between = range(divided, empty, step)
        shifted = [s + step if s in between and s != divided else s for s in assignment]
        for part in _parts(members, step, splits):
            candidate = list(shifted)
            for cluster in part:
                candidate[cluster] += step
            yield candidate


def _parts(members: list[int], step: int, splits: int) -> Iterator[list[int]]:
    """Yield the tails (`step` 1) or the heads (`step` -1) of clusters in topological order, halves first."""
    count = len(members)
    positions = sorted(range(1, count), key=lambda position: abs(2 * position - count))
    for position in positions[:: max(1, len(positions) // splits)]:
        yield members[position:] if step == 1 else members[:position]
