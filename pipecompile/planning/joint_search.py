"""Number of micro-batches, schedule, recomputation and cut chosen together, by the simulated step.

    counts ─▶ costs of each size ─▶ candidates: every schedule that suits ─▶ evaluator: cut, draft, simulate ─▶ argmin
                                    └─ and a searched schedule for the best cuts ──┘
                                    the winner is cut again with the time that is left ◀──────────────────────────┘

Smaller micro-batches have a smaller bubble and less memory in flight, but compute less efficiently, so each size has its own costs. Half of
the time limit is for comparing candidates, by dynamic programming only.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace

from pipecompile.batching.microbatches import MiniBatch
from pipecompile.costs import CostError
from pipecompile.errors import ScheduleError
from pipecompile.ir import Schedule
from pipecompile.ir.candidates import Considered
from pipecompile.options import Options
from pipecompile.planning.candidate_evaluation import CandidateEvaluator, Evaluated, Point
from pipecompile.planning.cost_table import CostTable, by_distance_to_default, samples_of
from pipecompile.planning.microbatch_counts import barred
from pipecompile.planning.planner import Planned
from pipecompile.schedules import CATALOGUE, Builder
from pipecompile.text.progress import task
from pipecompile.text.units import SECONDS, written
from pipecompile.tracing.traced_graph import TracedGraph

__all__ = ["compared_rows", "search_plan"]

_log = logging.getLogger("pipecompile.schedule")

_BEST_CUTS = 3
"""For this many of the best cuts a schedule is searched for."""

_CLOSE = 1.04
"""Step of a row for which a cut is searched with a second look, as a multiple of the shortest step."""

_EQUAL = 1e-9
"""Relative tolerance for comparing step times."""


def search_plan(graph: TracedGraph, batches: Sequence[MiniBatch], table: CostTable, options: Options) -> Planned:
    """Return the plan with the shortest simulated step, with every candidate that was compared.

    Raises InfeasibleError if nothing fits the memory, CostError or InputError if the model runs in none of the batches.
    """
    evaluator = CandidateEvaluator(graph, options, table, len(batches))
    rows = compared_rows(evaluator, graph, batches, table, options)
    if options.schedule == "auto":
        rows += [evaluator.with_searched_schedule(row) for row in _best_cuts(rows)]
    best = _shortest(rows)
    if best is None:
        raise evaluator.nothing_fits()
    final = evaluator.cut_again(best)
    rows = sorted([final if row is best else row for row in rows], key=lambda row: row.sort_key)
    considered = Considered(tuple(row.candidate for row in rows), rows.index(final))
    return evaluator.plan(final, considered)


def compared_rows(
    evaluator: CandidateEvaluator,
    graph: TracedGraph,
    batches: Sequence[MiniBatch],
    table: CostTable,
    options: Options,
) -> list[Evaluated]:
    """Return every candidate of the catalogue, those of the shortest steps with the cut that has the shortest step."""
    rows = _evaluated(evaluator, [*_points(graph, batches, table, options)])
    return _with_shorter_steps(evaluator, rows)


def _with_shorter_steps(evaluator: CandidateEvaluator, first: Sequence[Evaluated]) -> list[Evaluated]:
    """Search cuts for the best few rows, try these cuts in all other rows, and search again for rows that come near the best."""
    rows, searched = list(first), set[int]()
    for number in _ranked(rows)[:_BEST_CUTS]:
        rows[number] = evaluator.with_shorter_step(rows[number], first[number])
        searched.add(number)
    for other in sorted(searched):
        for number in _ranked(rows):
            shorter = evaluator.with_cut_of(rows[number], rows[other])
            if shorter is not rows[number]:
                rows[number] = shorter
                searched.discard(number)
    for _ in range(_BEST_CUTS):
        ranked = _ranked(rows)
        near = [n for n in ranked if n not in searched and rows[n].seconds <= _CLOSE * rows[ranked[0]].seconds]
        if near:
            rows[near[0]] = evaluator.with_shorter_step(rows[near[0]], first[near[0]])
            searched.add(near[0])
    return rows


def _ranked(rows: Sequence[Evaluated]) -> list[int]:
    """Return the numbers of the rows that fit the memory, those of the shortest step first."""
    return sorted((n for n, row in enumerate(rows) if row.draft), key=lambda n: rows[n].seconds)


def _evaluated(evaluator: CandidateEvaluator, points: Sequence[Point]) -> list[Evaluated]:
    """Return the candidates, evaluated one after the other while the progress shows the best so far."""
    rows = list[Evaluated]()

    def line() -> str:
        best = _shortest(rows)
        return "comparing schedules" + ("" if best is None else f", step {written(SECONDS, best.seconds)}")

    with task(line, len(points)) as work:
        for point in points:
            rows.append(evaluator.evaluate(point))
            work.advance()
            _log.debug("%s", rows[-1].candidate)
    return rows


def _points(graph: TracedGraph, batches: Sequence[MiniBatch], table: CostTable, options: Options) -> Iterator[Point]:
    """Yield every schedule that suits each number of micro-batches, numbers near the default first."""
    for batch in by_distance_to_default(batches, options):
        count, samples = len(batch.sizes), samples_of(batch)
        is_compared = len(batches) > 1 and samples is not None  # a number that the user chose is checked when it runs
        costs = table.get(samples)
        if is_compared and (reason := barred(graph, batch.sizes)):
            yield Point(count, samples, options, reason=reason)
        elif isinstance(costs, CostError):
            yield Point(count, samples, options, reason=costs.what, error=costs)
        else:
            yield from _schedules(count, samples, options)


def _schedules(count: int, samples: int | None, options: Options) -> Iterator[Point]:
    seen = set[tuple[object, ...]]()
    for name in _schedule_names(options):
        chosen = replace(options, n_microbatches=count, schedule=name)
        try:
            schedule = chosen.schedule_for(count)
        except ScheduleError as error:
            yield Point(count, samples, chosen, reason=error.what, error=error)
            continue
        if (schedule.placement, schedule.rows) not in seen:  # with few stages some schedules are the same
            seen.add((schedule.placement, schedule.rows))
            yield Point(count, samples, chosen, schedule)


def _schedule_names(options: Options) -> list[str | Schedule | Builder]:
    if options.schedule != "auto":
        return [options.schedule]
    counts = options.n_stages, len(options.devices)
    return [name for name, entry in CATALOGUE.items() if entry.compared and entry.suits(*counts)]


def _best_cuts(rows: Sequence[Evaluated]) -> list[Evaluated]:
    """Return the shortest row of each of the best few cuts."""
    best: dict[tuple[object, ...], Evaluated] = {}
    for row in sorted((row for row in rows if row.draft), key=lambda row: row.seconds):
        assert row.draft is not None
        cut = tuple(row.draft.partition.stage_of.values())
        best.setdefault((row.candidate.n_microbatches, row.draft.placement, cut), row)
    return list(best.values())[:_BEST_CUTS]


def _shortest(rows: Sequence[Evaluated]) -> Evaluated | None:
    """Return the first row whose step is the shortest, within the tolerance. Return None if no row fits the memory."""
    fitting = [row for row in rows if row.draft is not None]
    if not fitting:
        return None
    limit = min(row.seconds for row in fitting) * (1 + _EQUAL)
    return next(row for row in fitting if row.seconds <= limit)
