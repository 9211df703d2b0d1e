"""Simulated annealing of a cut under the estimate of `step_objective.py`: it leaves local minima of single moves.

A move takes one cluster to another stage, with all that precedence takes along. A move that lengthens the step by d seconds is made
with probability exp(-d / T); T falls from a share of the step to 0, in each of a few rounds. Kirkpatrick, Gelatt, Vecchi, "Optimization
by simulated annealing", Science 220, 1983. The moves are the same at every call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf, log
from random import Random
from typing import NamedTuple

from pipecompile.partitioners.clusters import Adjacency, adjacency
from pipecompile.partitioners.constraints import StageRanges
from pipecompile.partitioners.stage_paths import carry, cut_arcs, is_legal
from pipecompile.partitioners.step_objective import Score, StepObjective

__all__ = ["annealed_cuts"]


class _Round(NamedTuple):
    """A round begins `at_first`, or at the best cut so far. Estimates are `walked` or not. `heat` is the lengthening of the step, as a
    share of it, that the first moves make with probability 1/e.
    """

    at_first: bool
    walked: bool
    heat: float


_ROUNDS = (
    _Round(at_first=True, walked=False, heat=0.1),
    _Round(at_first=True, walked=True, heat=0.005),
    _Round(at_first=False, walked=False, heat=0.02),
    _Round(at_first=False, walked=True, heat=0.02),
    _Round(at_first=False, walked=True, heat=0.005),
)

_AT_BOUNDARY = 0.7
"""Share of the moves that join the ends of an arc between two stages: in a large graph, most other moves carry far too much."""

_TWICE = 0.3
"""Share of the moves that are two in one: two operations change places where neither can go alone."""

_NEXT = 0.7
"""Share of the other moves that go to the next stage; the rest goes to any."""


def annealed_cuts(
    objective: StepObjective, starts: Sequence[Sequence[int]], ranges: StageRanges | None, moves: int, most: int
) -> dict[tuple[int, ...], Score]:
    """Return the `most` shortest cuts that `moves` moves from legal cuts visit, with their estimates; these cuts alone if
    the least estimate is 0 or infinite. Rounds begin at the first of them, and at the best so far.

    Rounds without a walk see a smoother estimate, which is too low: they lead to cuts that the others do not reach.
    """
    found = {tuple(start): objective.score(start) for start in starts}
    if not 0 < min(found.values())[0] < inf:
        return found
    graph, draw, smooth = adjacency(objective.clusters), Random(0), replace(objective, walk=None)
    for each in _ROUNDS:
        start = tuple(starts[0]) if each.at_first else _shortest(found, 1)[0]
        cooling = _Cooling(each.heat * found[start][0], moves // len(_ROUNDS), draw)
        visited = _visited(objective if each.walked else smooth, start, ranges, cooling, graph)
        found |= visited if each.walked else {cut: objective.score(cut) for cut in _shortest(visited, most)}
    return {cut: found[cut] for cut in _shortest(found, most)}


def _shortest(found: Mapping[tuple[int, ...], Score], most: int) -> list[tuple[int, ...]]:
    return sorted(found, key=lambda cut: (found[cut], cut))[:most]


@dataclass(frozen=True, slots=True)
class _Cooling:
    """A round of moves: seconds by which one may lengthen the step at first, their number, and the source of random numbers."""

    heat: float
    moves: int
    draw: Random

    def limit(self, seconds: float, number: int) -> float:
        """Return the seconds that the step may take after a move, from a step of so many."""
        return seconds - self.heat * (1 - number / self.moves) ** 2 * log(1 - self.draw.random())


def _visited(
    objective: StepObjective, start: Sequence[int], ranges: StageRanges | None, cooling: _Cooling, graph: Adjacency
) -> dict[tuple[int, ...], Score]:
    """Return the cuts that the moves of a round reach."""
    clusters, n_stages = objective.clusters, len(objective.placement)
    cut, score, found = list(start), objective.score(start), dict[tuple[int, ...], Score]()
    near = cut_arcs(clusters, cut)
    for number in range(cooling.moves):
        moved = list(cut)
        for _ in range(1 + (cooling.draw.random() < _TWICE)):
            cluster, target = _move(moved, near, n_stages, cooling.draw)
            carry(moved, cluster, target, graph[target > moved[cluster]])
        if moved == cut or not is_legal(clusters, ranges, moved):
            continue
        limit = cooling.limit(score[0], number)
        value = objective.score(moved, limit)
        if value < score or value[0] < limit:
            cut, score, near = moved, value, cut_arcs(clusters, moved)
            found[tuple(moved)] = value
    return found


def _move(cut: Sequence[int], near: Sequence[tuple[int, int]], n_stages: int, draw: Random) -> tuple[int, int]:
    """Return a cluster and the stage to which it shall go, perhaps its own. `near` are the arcs between stages."""
    if near and draw.random() < _AT_BOUNDARY:
        a, b = draw.choice(near)
        return draw.choice(((a, cut[b]), (b, cut[a])))
    cluster = draw.randrange(len(cut))
    if draw.random() < _NEXT:
        return cluster, min(max(cut[cluster] + draw.choice((-1, 1)), 0), n_stages - 1)
    return cluster, draw.randrange(n_stages)
