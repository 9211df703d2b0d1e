"""A stage left empty gets work of its neighbours, where no device is the slower for it.

    [a b] [c d] [e f] [ ]          ──►          [a b] [c d] [e] [f]

Nine equal layers in six stages take as long as in five; whoever asks for six has six devices to fill, and memory on all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pipecompile.partitioners.clusters import Clusters
from pipecompile.partitioners.machine import Stages
from pipecompile.partitioners.objective import bottleneck

__all__ = ["spread"]

_SLACK = 1 + 1e-9
_CUTS = 32
"""So many places are tried at which a stage may be divided."""


def spread(clusters: Clusters, stages: Stages, stage: Sequence[int]) -> list[int]:
    """The same cut with as few empty stages as may be; its bottleneck does not rise. O(stages^2) evaluations."""
    best, most = list(stage), bottleneck(clusters, stages, stage) * _SLACK
    while (better := _filled(clusters, stages, best, most)) is not None:
        best = better
    return best


def _filled(clusters: Clusters, stages: Stages, stage: list[int], most: float) -> list[int] | None:
    """One empty stage fewer, if any way is found."""
    held = set(stage)
    for empty in (s for s in range(len(stages)) if s not in held):
        for tried in _ways(stage, empty, len(stages)):
            pinned = all(tried[cluster] in pins for cluster, pins in clusters.pins.items())
            if pinned and bottleneck(clusters, stages, tried) <= most:
                return tried
    return None


def _ways(stage: list[int], empty: int, n_stages: int) -> Iterator[list[int]]:
    """Cuts in which a stage is divided, the nearest first, and those between it and the empty one move up."""
    for divided in sorted(range(n_stages), key=lambda s: abs(s - empty)):
        members = [cluster for cluster, s in enumerate(stage) if s == divided]
        step = 1 if divided < empty else -1
        between = range(divided, empty, step)
        moved = [s + step if s in between and s != divided else s for s in stage]
        for part in _parts(members, step):
            tried = list(moved)
            for cluster in part:
                tried[cluster] += step
            yield tried


def _parts(members: list[int], step: int) -> Iterator[list[int]]:
    """Of clusters in topological order those at the end, or the beginning: half of them first, then more or fewer."""
    count = len(members)
    places = sorted(range(1, count), key=lambda place: abs(2 * place - count))
    for place in places[:: max(1, len(places) // _CUTS)]:
        yield members[place:] if step == 1 else members[:place]
