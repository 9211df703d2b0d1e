"""Cuts with a short step: starts of many kinds, each improved by moves under the estimate of `step_objective.py`.

    the cut with the least bottleneck ─────────────────────┐
    linear orders, boundaries slid (sliding_cuts.py) ──────┤
    the graph contracted to its branches ─► cut again ─────┴─► moves of parts of stages ─┬─► the best few, all different
    a small graph ─► branch and bound (short_cuts.py) ───────────────────────────────────┤
    not proven: the best of these ─► annealed (annealing.py) ────────────────────────────┘

A move takes one cluster to another stage, with all that precedence takes along; or all clusters of a stage that wait for another
stage, or that another stage waits for. The search ends after a fixed amount of work, so that it finds the same cuts everywhere.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from random import Random

from pipecompile.partitioners.annealing import annealed_cuts
from pipecompile.partitioners.clusters import BLOCK, Adjacency, Clusters, adjacency
from pipecompile.partitioners.constraints import StageRanges, stage_ranges
from pipecompile.partitioners.contraction import contract_branches
from pipecompile.partitioners.dp.chain_partition import cut_order
from pipecompile.partitioners.dp.strategy import candidate_orders
from pipecompile.partitioners.rebalance import MAX_SPLITS, divided
from pipecompile.partitioners.short_cuts import add_short_cuts
from pipecompile.partitioners.sliding_cuts import sliding_cuts
from pipecompile.partitioners.stage_paths import carry, is_legal, path_moves, stage_edges
from pipecompile.partitioners.step_objective import Score, StepObjective

__all__ = ["near_cuts", "step_cuts"]

_CAPS = (0.25, 0.5, 1.0, 1.3)
"""Seconds of a contracted series, as multiples of the mean work of a stage."""

_BLOCK = 0.25
"""Seconds of a region that is contracted, as a multiple of the mean work of a stage."""

_WORK = 800_000
"""Effort of all moves of a search: about a second."""

_SLACK = 1 - 1e-6
"""Factor by which a move must shorten the step."""

_KICKS = 16
"""Times that the best cut is left by random moves; fewer where an estimate takes long."""

_NEAR = 500
"""Cuts one move away that are estimated."""

_VISITS = 75_000
"""Partial cuts of a small graph that each round of branch and bound visits, divided by the stages: some tenths of a second."""

_ALIKE = 4
"""Cuts that are searched for every one that is returned: some differ by an addition from others."""

_SAME_WORK = 0.005
"""Difference of the seconds of a stage, or of its transfers, that counts: a multiple of the mean work of a stage."""

_ORDERS = 6
"""Linear orders of a contracted graph that are cut."""

_ANNEALING = 1_200_000
"""Effort of the annealing: about a second."""

_LEAST_SPLITS, _LEAST_DIVIDED = 4, 2
"""Positions at which a stage is divided, and stages that are, for an empty one, at least."""

_SLID = 3
"""Cuts of linear orders that are improved."""


Estimates = dict[tuple[int, ...], Score]
"""Cuts with their estimated steps."""


def step_cuts(objective: StepObjective, start: Sequence[int], ranges: StageRanges | None, most: int) -> list[list[int]]:
    """Return up to `most` different cuts, the shortest estimated step first, some of every kind. `start` is a legal cut."""
    slid, contracted = sliding_cuts(objective, ranges, _SLID), list(_contracted_cuts(objective))
    starts: list[list[list[int]]] = [[list(start)], slid, contracted]
    share = _WORK // objective.effort // sum(map(len, starts))
    kinds = [_improved(objective, cuts, ranges, share) for cuts in starts]
    kinds.append(_kicked(objective, ranges, _merged(kinds)))
    every = _merged(kinds)
    if not add_short_cuts(objective, ranges, every, _ALIKE * most, _VISITS // len(objective.placement)):
        moves = _ANNEALING // objective.effort
        annealed = annealed_cuts(objective, [start, _sorted(every)[0]], ranges, moves, _ALIKE * most)
        kinds.append(annealed | _improved(objective, _sorted(annealed)[:1], ranges, share))
        every = _merged([*kinds, every])
    chosen = [cut for kind in kinds for cut in islice(_different(objective, _sorted(kind)), most // (len(kinds) + 1))]
    unfilled = chosen + _sorted(every)[:most]
    filled = [_filled(objective, cut, ranges, len(set(start)), _WORK // len(unfilled)) for cut in unfilled]
    return _sorted({tuple(cut): objective.score(cut) for cut in islice(_different(objective, filled), most)})


def _filled(objective: StepObjective, cut: list[int], ranges: StageRanges | None, used: int, effort: int) -> list[int]:
    """Return the cut with `used` stages in use: a part of another stage goes to an empty one, where that lengthens the step least."""
    share = effort // objective.effort // max(1, used - len(set(cut)))
    while len(set(cut)) < used:
        legal = [each for each in _divisions(objective, cut, share) if is_legal(objective.clusters, ranges, each)]
        if not legal:
            break
        cut = min(legal, key=objective.score)
    return cut


def _divisions(objective: StepObjective, cut: list[int], most: int) -> Iterator[list[int]]:
    """Yield the cuts in which one stage gives a part to an empty one; if these are more than `most`, then to the nearest empty one, at
    a few positions, and perhaps of the slowest stages alone.
    """
    sizes = Counter(cut)
    divisible = [stage for stage, size in sizes.items() if size > 1]
    empty = [stage for stage in range(len(objective.placement)) if stage not in sizes]
    positions = sum(min(sizes[stage] - 1, MAX_SPLITS) for stage in divisible)
    if len(empty) * positions <= most:
        yield from (each for stage in empty for each in divided(cut, stage, divisible))
        return
    seconds, splits = objective.stage_times(cut), max(_LEAST_SPLITS, min(MAX_SPLITS, most // len(divisible)))
    slowest = sorted(divisible, key=lambda stage: -seconds[stage])[: max(_LEAST_DIVIDED, most // splits)]
    for stage in sorted(slowest):
        nearest = min(empty, key=lambda other: abs(other - stage))
        yield from divided(cut, nearest, [stage], splits)


def _merged(kinds: Sequence[Estimates]) -> Estimates:
    return {cut: score for kind in kinds for cut, score in kind.items()}


def _sorted(found: Estimates) -> list[list[int]]:
    return [list(cut) for cut in sorted(found, key=lambda cut: (found[cut], cut))]


def _improved(
    objective: StepObjective, cuts: Sequence[Sequence[int]], ranges: StageRanges | None, evaluations: int
) -> Estimates:
    """Return the cuts that are legal, and each after moves that improve it."""
    legal = [tuple(cut) for cut in cuts if is_legal(objective.clusters, ranges, cut)]
    after = [tuple(_descend(objective, cut, ranges, evaluations)) for cut in legal]
    return {cut: objective.score(cut) for cut in [*legal, *after]}


def _different(objective: StepObjective, cuts: Sequence[list[int]]) -> Iterator[list[int]]:
    """Yield the cuts but for those with nearly the work and the transfers of an earlier one, along the same path of stages. Where
    backwards are divided, cuts of the same work differ: what a stage computes for others and what for its weights decides.
    """
    least, seen = _SAME_WORK * sum(objective.times) / len(objective.placement) or 1.0, set[tuple[object, ...]]()
    for cut in cuts:
        kind = tuple(cut) if objective.is_split else _rounded(objective, cut, least)
        if kind not in seen:
            seen.add(kind)
            yield cut


def _rounded(objective: StepObjective, cut: list[int], least: float) -> tuple[object, ...]:
    """Return the work of each stage and the transfers of a cut, in multiples of `least` seconds."""
    work = (round(time / least) for time in objective.stage_times(cut))
    return (*work, *((edge, round(delay / least)) for edge, delay in objective.edges(cut)))


def _kicked(objective: StepObjective, ranges: StageRanges | None, found: Estimates) -> Estimates:
    """Return further cuts: leave the best by two random moves, and improve again; the same moves at every call."""
    draw, graph, kicked = Random(0), adjacency(objective.clusters), dict[tuple[int, ...], Score]()
    for _ in range(min(_KICKS, _WORK // objective.effort // _NEAR)):
        cut = _sorted(_merged([found, kicked]))[0]
        for _ in range(2):
            moves = list(islice(_moves(objective, cut, ranges, graph), _NEAR))
            cut = draw.choice(moves) if moves else cut
        best = tuple(_descend(objective, cut, ranges, _NEAR))
        kicked[best] = objective.score(best)
    return kicked


def near_cuts(
    objective: StepObjective, cut: Sequence[int], ranges: StageRanges | None, most: int, factor: float
) -> list[list[int]]:
    """Return up to `most` cuts that are one move away, the shortest estimated step first, at most `factor` times that of `cut`."""
    limit = objective.score(cut)[0] * factor
    moved = dict.fromkeys(map(tuple, _moves(objective, list(cut), ranges, adjacency(objective.clusters))))
    scores = {each: objective.score(each) for each in islice(moved, _NEAR)}
    return [list(each) for each in sorted(scores, key=lambda each: (scores[each], each)) if scores[each][0] <= limit][
        :most
    ]


def _contracted_cuts(objective: StepObjective) -> Iterator[list[int]]:
    """Yield cuts of the graph contracted to its branches, as cuts of the graph."""
    clusters, machine, n_stages = objective.clusters, objective.machine, len(objective.placement)
    if len(clusters) > BLOCK:
        return
    mean, before = sum(clusters.time) / n_stages, len(clusters) + 1
    for cap in _CAPS:
        coarse = contract_branches(clusters, _BLOCK * mean, cap * mean)
        if not n_stages <= len(coarse) < before or _contradicts(coarse):
            continue
        before = len(coarse)
        ranges, estimate = stage_ranges(coarse, n_stages), replace(objective, clusters=coarse)
        share = _WORK // estimate.effort // _ORDERS // len(_CAPS)
        for order in islice(candidate_orders(coarse, ranges), _ORDERS):
            cut = cut_order(coarse, machine, order, ranges)
            if cut is not None and is_legal(coarse, ranges, cut):
                yield clusters.project(coarse, cut)
                yield clusters.project(coarse, _descend(estimate, cut, ranges, share))


def _contradicts(clusters: Clusters) -> bool:
    """Return whether contraction joined nodes that the user wants apart."""
    return any(a == b for a, b in clusters.strict_arcs) or any(len(pins) > 1 for pins in clusters.pins.values())


def _descend(objective: StepObjective, start: Sequence[int], ranges: StageRanges | None, evaluations: int) -> list[int]:
    """Return the cut after moves that improve it, at most `evaluations` tried."""
    best, score, improved = list(start), objective.score(start), True
    graph = adjacency(objective.clusters)
    while improved:
        improved = False
        for candidate in _moves(objective, best, ranges, graph):
            evaluations -= 1
            if evaluations < 0:
                return best
            value = objective.score(candidate, score[0])
            if _is_better(value, score):
                best, score, improved = candidate, value, True
                break
    return best


def _is_better(value: Score, score: Score) -> bool:
    return value[0] < score[0] * _SLACK or (value[0] * _SLACK <= score[0] and value[1] < score[1] * _SLACK)


def _moves(
    objective: StepObjective,
    assignment: list[int],
    ranges: StageRanges | None,
    graph: Adjacency,
) -> Iterator[list[int]]:
    """Yield the cuts that are one move away: numbers of stages and parts of stages first, then single clusters at a boundary."""
    clusters, n_stages = objective.clusters, len(objective.placement)
    edges = stage_edges(clusters, assignment)
    for a in range(n_stages - 1):
        if (a, a + 1) not in edges:  # stages beside each other change their numbers
            swapped = [{a: a + 1, a + 1: a}.get(s, s) for s in assignment]
            if is_legal(clusters, ranges, swapped):
                yield swapped
    yield from path_moves(clusters, n_stages, assignment, ranges, graph)
    predecessors, successors = graph
    for v, stage in enumerate(assignment):
        near = {assignment[other] for other in (*predecessors[v], *successors[v])}
        if near == {stage}:
            continue
        for target in sorted({*near, max(stage - 1, 0), min(stage + 1, n_stages - 1)} - {stage}):
            candidate = list(assignment)
            carry(candidate, v, target, successors if target > stage else predecessors)
            if is_legal(clusters, ranges, candidate):
                yield candidate
