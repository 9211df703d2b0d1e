"""Simulated annealing of a cut under the estimate of `step_objective.py`: what single improving moves cannot leave, it can.

A move takes one cluster to another stage, with all that precedence takes along. A move that lengthens the step by d seconds is made
with probability exp(-d / T); T falls from `_HEAT` of the first step to 0. Kirkpatrick, Gelatt, Vecchi, "Optimization by simulated
annealing", Science 220, 1983. The moves are the same at every call.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, inf
from random import Random

from pipecompile.partitioners.clusters import adjacency
from pipecompile.partitioners.constraints import StageRanges
from pipecompile.partitioners.stage_paths import carry, is_legal
from pipecompile.partitioners.step_objective import Score, StepObjective

__all__ = ["annealed_cuts"]

_HEAT = 0.05
"""Lengthening of the step, as a share of it, that the first moves make with probability 1/e."""

_NEXT = 0.7
"""Share of the moves that go to the next stage; the others go to any."""


def annealed_cuts(
    objective: StepObjective, start: Sequence[int], ranges: StageRanges | None, moves: int, most: int
) -> dict[tuple[int, ...], Score]:
    """Return the `most` shortest cuts that so many moves from a legal cut visit, with their estimates; that cut alone if
    its estimate is 0 or infinite.
    """
    cut, score, draw = list(start), objective.score(start), Random(0)
    found, heat = {tuple(start): score}, _HEAT * score[0]
    if not 0 < heat < inf:
        return found
    predecessors, successors = adjacency(objective.clusters)
    for number in range(moves):
        cluster, target = _move(cut, len(objective.placement), draw)
        if target == cut[cluster]:
            continue
        moved = list(cut)
        carry(moved, cluster, target, successors if target > cut[cluster] else predecessors)
        if not is_legal(objective.clusters, ranges, moved):
            continue
        value, temperature = objective.score(moved), heat * (1 - number / moves) ** 2
        if value < score or draw.random() < exp((score[0] - value[0]) / temperature):
            cut, score = moved, value
            found[tuple(moved)] = value
    return {each: found[each] for each in sorted(found, key=lambda each: (found[each], each))[:most]}


def _move(cut: Sequence[int], n_stages: int, draw: Random) -> tuple[int, int]:
    """Return a cluster and the stage to which it shall go, perhaps its own."""
    cluster = draw.randrange(len(cut))
    if draw.random() < _NEXT:
        return cluster, min(max(cut[cluster] + draw.choice((-1, 1)), 0), n_stages - 1)
    return cluster, draw.randrange(n_stages)
