"""Micro-batches in flight on every stage: the peak of a schedule, and that of stages that are a DAG instead of a chain.

stage 0 ─► 1 ─► 2 ─► 3       3 stages after the first: under 1F1B it holds 4 micro-batches
stage 0 ─► 3 ◄─ 1, 2         1 stage after the first: it holds 2
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from pipecompile.costs import NodeCost
from pipecompile.ir import Kind, Schedule
from pipecompile.ir.routes import stages_after
from pipecompile.options import Options
from pipecompile.planning.draft import Draft, make_draft
from pipecompile.planning.schedule_choice import make_schedule
from pipecompile.schedules.building_blocks import chain_after
from pipecompile.tracing.traced_graph import TracedGraph

__all__ = ["by_depth", "peak_in_flight"]


def by_depth(
    graph: TracedGraph,
    draft: Draft,
    costs: Mapping[str, NodeCost],
    options: Options,
    count: int,
    samples: int | None,
) -> Draft:
    """Return the draft with the micro-batches in flight of its DAG of stages; of a chain, the same draft. The cut was solved for as
    many as a chain holds, which are no fewer.
    """
    if stages_after(options.n_stages, draft.routes) == chain_after(options.n_stages):
        return draft
    if options.schedule == "auto" or isinstance(options.schedule, Schedule):
        return draft
    schedule = make_schedule(options, draft.stages, draft.routes, draft.placement, count)
    problem = replace(draft.problem, in_flight=peak_in_flight(schedule, options))
    return make_draft(graph, draft.partition, problem, costs, options, draft.placement, samples)


_CHANGE_IN_FLIGHT = {Kind.FORWARD: 1, Kind.RECOMPUTE: 1, Kind.BACKWARD: -1, Kind.WEIGHT_GRAD: -1}


def peak_in_flight(schedule: Schedule, options: Options) -> tuple[float, ...]:
    """Return, per stage, the peak number of micro-batches whose forward has run and whose backward has not.

    A backward is B, or W if split. For cells that the schedule itself recomputes, R counts instead of F. Recomputation
    requested by `checkpoint` is part of the Problem.
    """
    actions = (a for row in schedule.rows for a in row if a.kind is Kind.RECOMPUTE and options.checkpoint == "never")
    recomputed = {(action.stage, action.microbatch) for action in actions}
    now, peak = [0] * options.n_stages, [1] * options.n_stages
    for row in schedule.rows:
        for action in row:
            is_recomputed = (action.stage, action.microbatch) in recomputed
            if action.kind is (Kind.FORWARD if is_recomputed else Kind.RECOMPUTE):
                continue
            now[action.stage] += _CHANGE_IN_FLIGHT.get(action.kind, 0)
            peak[action.stage] = max(peak[action.stage], now[action.stage])
    return tuple(map(float, peak))
