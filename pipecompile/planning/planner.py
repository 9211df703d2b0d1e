"""From a traced graph and its costs to a plan, where the number of micro-batches and the schedule are given.

    graph, costs ─▶ Problem ─▶ Partition ─▶ Draft ─▶ Plan
                make_problem    solve_cut  make_draft  plan_of

`joint_search` walks the same path once per candidate where the number or the schedule is left open.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

from pipecompile.batching.microbatches import MiniBatch
from pipecompile.costs import NodeCost
from pipecompile.costs.problem_builder import build_problem
from pipecompile.errors import InfeasibleError, PartitionError
from pipecompile.graph.colocation import compute_nodes, ties_of
from pipecompile.graph.separable_pieces import check_pieces
from pipecompile.ir import Schedule
from pipecompile.ir.candidates import Considered
from pipecompile.ir.plan import Plan
from pipecompile.options import Options
from pipecompile.partitioners import Partition, Problem
from pipecompile.planning.cost_table import CostTable, MeasuredCosts, samples_of
from pipecompile.planning.draft import Draft, by_depth, make_draft, peak_in_flight, plan_of
from pipecompile.planning.infeasible_hint import with_enough_stages
from pipecompile.planning.schedule_choice import search_schedule
from pipecompile.planning.solve_cut import (
    bottleneck_without_constraints,
    memory_excess,
    solve_cut,
    warn_of_empty_stages,
    warn_of_gap,
)
from pipecompile.tracing.traced_graph import TracedGraph

__all__ = ["Planned", "check_stage_count", "make_plan", "make_problem", "planned"]


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan; the problem that its cut solves, if this process built it; the samples of a micro-batch.

    `stage_of` is the cut on the graph at hand, by node name, if that differs from the graph of the plan.
    """

    plan: Plan
    problem: Problem | None
    samples: int | None
    stage_of: Mapping[str, int] | None = None


def make_plan(graph: TracedGraph, batch: MiniBatch, table: CostTable, options: Options) -> Planned:
    """Cut the graph for the micro-batches of `batch` and the schedule of `options`.

    Raises PartitionError if the graph has fewer separable pieces than stages, InfeasibleError if no cut fits the memory.
    """
    samples, count = samples_of(batch), len(batch.sizes)
    costs = table[samples]
    assert isinstance(costs, MeasuredCosts), "measure_costs raises for a single candidate"
    schedule = options.schedule_for(count, custom=False)
    problem = make_problem(graph, costs.by_node, options, schedule)
    steered = options.steering.on(graph, problem)
    try:
        partition, solved = solve_cut(graph, steered, options)
    except InfeasibleError as error:
        of_dag = _cut_of_dag(graph, steered, costs.by_node, options, schedule, samples)
        if of_dag is None:
            raise with_enough_stages(error, partial(problem_for, graph, costs.by_node, count), options) from None
        partition, solved = of_dag
    warn_of_gap(partition, options)
    draft = make_draft(graph, partition, solved, costs.by_node, options, schedule.placement, samples)
    draft = by_depth(graph, draft, costs.by_node, options, count, samples)
    if options.schedule == "auto" and not options.has_unequal_devices:
        searched = search_schedule(options.with_recompute(partition.recompute), draft.stages, draft.routes, count)
        draft = replace(draft, placement=searched.placement)
    elif options.n_stages > 1:
        from pipecompile.planning.step_search import shorten_step

        draft = shorten_step(graph, draft, costs.by_node, options, count, samples)
    return planned(graph, draft, problem, costs, options, samples)


def _cut_of_dag(
    graph: TracedGraph,
    problem: Problem,
    costs: Mapping[str, NodeCost],
    options: Options,
    schedule: Schedule,
    samples: int | None,
) -> tuple[Partition, Problem] | None:
    """Return a cut whose stages fit because they are a DAG, which holds fewer micro-batches than the chain of `schedule`, and its
    problem. The cut is the best for one micro-batch in flight per stage; None if it does not fit.
    """
    if options.n_stages < 3 or problem.memory_limit is None:
        return None
    try:
        partition, solved = solve_cut(graph, replace(problem, in_flight=(1.0,) * options.n_stages), options)
    except PartitionError:
        return None
    draft = make_draft(graph, partition, solved, costs, options, schedule.placement, samples)
    lighter = by_depth(graph, draft, costs, options, schedule.n_microbatches, samples)
    is_chain = lighter is draft
    return (
        None
        if is_chain or memory_excess(lighter.problem, partition, options.n_stages)
        else (partition, lighter.problem)
    )


def planned(
    graph: TracedGraph,
    draft: Draft,
    problem: Problem,
    costs: MeasuredCosts,
    options: Options,
    samples: int | None,
    considered: Considered | None = None,
) -> Planned:
    """Return the draft as a plan. `problem` has no constraints of the user: its bottleneck shows what those cost."""
    warn_of_empty_stages(draft.partition.stage_of, options)
    unforced = bottleneck_without_constraints(graph, problem, draft.partition, options) if options.steering else None
    plan = plan_of(graph, draft, costs.model, options, unforced=unforced, considered=considered, samples=samples)
    return Planned(plan, draft.problem, samples)


def problem_for(graph: TracedGraph, costs: Mapping[str, NodeCost], count: int, options: Options) -> Problem:
    """Return the problem for `count` micro-batches under the schedule of `options`."""
    return make_problem(graph, costs, options, options.schedule_for(count, custom=False))


def make_problem(graph: TracedGraph, costs: Mapping[str, NodeCost], options: Options, schedule: Schedule) -> Problem:
    """Return the partition problem: the graph and the machine, without the user's constraints.

    Where devices are alike and have no memory limit, every stage counts as a device: even stages make even devices.
    """
    links, placement = options.links, schedule.placement
    problem = build_problem(
        graph,
        costs,
        seconds_per_byte=links.seconds_per_byte,
        latency=links.latency,
        memory_limit=options.memory_limit,
        in_flight=peak_in_flight(schedule, options),
        optimizer_state=options.optimizer_state,
        shards=options.shards if options.reshard_after_forward else 1,
        restored=options.restored_at_once(schedule.n_microbatches),
    )
    is_shared = options.has_unequal_devices and placement != tuple(range(options.n_stages))
    return replace(
        problem,
        speed=options.speeds,
        links=links.factors,
        placement=placement if is_shared else None,
        recompute=options.recompute,
    )


def check_stage_count(graph: TracedGraph, n_stages: int) -> None:
    """Raise PartitionError if the graph has fewer separable pieces than stages. Ties alone are counted: a cut with an empty
    stage is checked again.
    """
    tied = sum(len(group) - 1 for group in ties_of(graph).groups)
    if n_stages > len(compute_nodes(graph)) - tied:
        check_pieces(graph, n_stages)
