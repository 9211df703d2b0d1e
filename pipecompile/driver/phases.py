"""The whole compilation, phase by phase.

    model, mini-batch
      │ record      one forward of a micro-batch, on fake tensors, as a graph
      │ prepare     note which nodes must share a stage
      │ cost        seconds and bytes of every node, at every micro-batch size that is compared
      │ partition   solve the cut, and choose what the user left open: number of micro-batches, schedule
      │ split       the routes of values between stages, and one graph per stage
      │ place       parameters and buffers to the devices of their stages
      ▼
    specialization              one per signature of a call
      │ lower       schedule and routes to a program: actions, transfers, frees
      │ bind        program and stages to what runs
      ▼
    executable                  one per number of micro-batches

`PhaseLog.run` is the one hook between phases: it verifies, takes the time, and notes a line for the dump. The decisions that one
process and several ranks take differently stand in the `Backend`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from pipecompile.batching.batch_dims import batch_dims_text
from pipecompile.batching.call_inputs import FlatInputs
from pipecompile.batching.microbatches import MiniBatch
from pipecompile.batching.sample_lists import lists_of_tensors
from pipecompile.costs import CostError
from pipecompile.driver.backend import Backend
from pipecompile.driver.compile_context import CompileContext, CompileRequest, Decision
from pipecompile.driver.left_on_ranks import with_left_for_loss
from pipecompile.driver.phase_log import PhaseLog
from pipecompile.driver.specialization import Specialization
from pipecompile.errors import InputError, PipecompileError, PlanError, TraceError
from pipecompile.graph.colocation import compute_nodes, note_ties
from pipecompile.graph.cross_sample import (
    check_batch_first,
    check_sync_batchnorm,
    cross_sample_lines,
    norms_by_node,
    scripted_norms,
)
from pipecompile.graph.cut_transfer import transfer_cut
from pipecompile.graph.left_order import ordered_routes
from pipecompile.graph.region_parts import rewritten_state
from pipecompile.graph.stages import Stage, split
from pipecompile.ir import Route
from pipecompile.ir.plan import Plan
from pipecompile.options import Options
from pipecompile.parameters.placement import move_model
from pipecompile.parameters.tied_mirrors import Mirrors
from pipecompile.planning.cost_table import CostTable, MeasuredCosts, hint_at_small_microbatches, measure_costs
from pipecompile.planning.joint_search import search_plan
from pipecompile.planning.plan_memory import check_plan_memory
from pipecompile.planning.planner import Planned, check_stage_count, make_plan
from pipecompile.runtime.cells.deferred_batchnorm import DeferredNorms, defer_norms
from pipecompile.text.progress import switched
from pipecompile.text.units import counted
from pipecompile.tracing.ambient_modes import INFERENCE_MODE, contained
from pipecompile.tracing.node_facts import has_regions
from pipecompile.tracing.reachable_code import searches_kept
from pipecompile.tracing.recording import record
from pipecompile.tracing.traced_graph import TracedGraph
from pipecompile.verifiers.plan import verify_plan
from pipecompile.verifiers.traced_graph import verify_graph

__all__ = ["check_division", "place", "specialize"]


def specialize(
    request: CompileRequest, options: Options, decision: Decision, context: CompileContext
) -> tuple[Specialization, Decision]:
    """Compile for one kind of call. Return the specialization, and the decision for later ones.

    Raises TraceError, InputError, CostError, PartitionError, PlanError or VerifyError.
    """
    log, backend = PhaseLog(), context.backend
    check_sync_batchnorm(context.model, options.batch_norm, options.dispatch)
    with switched(options.progress), searches_kept(), contained(), backend.without_collectives(context.model, options):
        graph = log.run("record", _record_on_all, request, context, describe=_nodes)
        graph = log.run("prepare", note_ties, graph, verify=verify_graph, describe=_nodes)
        backend.agree_on_graph(graph, options.n_stages, request.counts, request.changes)
        _check_division(graph, request, options, context)
        planned = decision.on(graph, request.samples, tuple(map(str, options.devices)))
        if planned is None:
            costs = log.run("cost", _cost, graph, request, options, decision, context, describe=_models)
            planned = log.run(
                "partition", _partition, graph, request, options, decision, costs, context, describe=_solution
            )
        options = options if decision.plan else options.with_choice_of(planned.plan)
        plan_routes, stages = log.run(
            "split", _split, graph, planned, options, request, decision.is_given, backend, describe=_crossings
        )
        mirrors, norms = log.run("place", place, graph, stages, planned.plan, options, context)
    guards = graph.facts.reads.guards() if graph.facts.reads else None  # after tensors have moved to their homes
    plan, overlaps = planned.plan, backend.overlaps
    executable, final = backend.executable(mirrors), options.with_recompute(plan.recompute)
    specialization = Specialization(
        graph, request.signature, plan, final, plan_routes, stages, mirrors, norms, executable, log, guards, overlaps
    )
    return specialization, decision.after(planned, specialization.cut, _asked_counts(request, options))


def _asked_counts(request: CompileRequest, options: Options) -> tuple[int, int] | None:
    """Return the asked and the present number of micro-batches; None if the number was chosen, among those that the samples allow."""
    return (options.default_microbatches, len(request.batch.sizes)) if len(request.candidates) == 1 else None


# -- record ---------------------------------------------------------------------------------------------------------


def _record_on_all(request: CompileRequest, context: CompileContext) -> TracedGraph:
    """Record one micro-batch. An error of all processes is one after which all go on."""
    try:
        return _record(request, context)
    except PipecompileError as error:
        context.backend.agree_on_error(error)
        raise


def _record(request: CompileRequest, context: CompileContext) -> TracedGraph:
    """Record one micro-batch. If that fails, the error names the inputs that may have no batch dimension."""
    whole, part = request.batch.whole, request.batch.first
    with_grad = torch.is_grad_enabled()  # read first: leaving inference mode turns gradients on
    is_inference = torch.is_inference_mode_enabled()
    try:
        with torch.inference_mode(False), torch.set_grad_enabled(with_grad):
            graph = _record_part(part, request, context)
    except TraceError as error:
        is_divided, hints = whole.samples != part.samples, [error.hint]
        if is_divided and (doubtful := whole.ambiguous_leaves()):
            hints.append(f"{batch_dims_text((name, None) for name in doubtful)}, if all samples share it")
        if is_divided and (lists := [*lists_of_tensors(dict(zip(whole.arguments, whole.values, strict=True)))]):
            hints.append(f"{batch_dims_text((name, list) for name in lists)}, if there is an entry per sample in it")
        if len(hints) == 1:
            raise
        hint = "; or ".join(hints)
        raise TraceError(error.what, code=error.code, where=error.where, why=error.why, hint=hint) from error
    if is_inference and graph.facts.reads and (place := graph.facts.reads.asked.get(INFERENCE_MODE)):
        why = "a model is recorded and compared outside of inference mode"
        hint = "torch.no_grad() around the call, and torch.is_grad_enabled() in the model"
        raise InputError("the forward asks whether inference mode is on", where=place, why=why, hint=hint)
    return graph


def _record_part(part: FlatInputs, request: CompileRequest, context: CompileContext) -> TracedGraph:
    """Record a micro-batch. Numbers that change between steps are read at every run; those for which this fails are constants."""
    graph = context.rebound.recorded(lambda: _record_lifted(part, request, context))
    context.kept[context.model.training] = graph.facts.kept
    return graph


def _record_lifted(part: FlatInputs, request: CompileRequest, context: CompileContext) -> TracedGraph:
    carries = context.rebound.carrying(len(one.sizes) for one in request.candidates)
    lifted, device, kept = request.lifted, context.meta_init.device, context.kept.get(context.model.training, ())
    while lifted.holders:
        try:
            graph = record(context.model, part, device, lifted, kept, carries=carries)
        except TraceError as error:
            lifted = context.changing.refuse(lifted, error)
        else:
            context.changing.note_kept(graph)
            return graph
    return record(context.model, part, device, kept=kept, carries=carries)


def _check_division(graph: TracedGraph, request: CompileRequest, options: Options, context: CompileContext) -> None:
    if len(request.candidates) == 1 and len(request.batch.sizes) > 1 and not request.batch.is_listed:
        check_division(graph, options, context)


def check_division(graph: TracedGraph, options: Options, context: CompileContext) -> None:
    """Raise InputError if micro-batches are not batches to the model. Warn if they change what the model computes."""
    check_batch_first(graph)
    if graph.facts.carried:
        graph.facts.carried.check_microbatches()
    if options.across_batch is None:
        context.warnings.mixed(cross_sample_lines(graph))
    is_rewritten = has_regions(graph.graph.nodes)
    norms = norms_by_node(graph, context.model) if options.batch_norm != "each" or is_rewritten else {}
    scripted = scripted_norms(graph, options.batch_norm)
    if options.batch_norm is None:
        context.warnings.normalised(len({id(layer) for layer in norms.values()}) + scripted)
    if is_rewritten:
        context.warnings.rewritten(rewritten_state(graph, norms if options.batch_norm == "deferred" else ()))


# -- cost, partition ------------------------------------------------------------------------------------------------


def _cost(
    graph: TracedGraph, request: CompileRequest, options: Options, decision: Decision, context: CompileContext
) -> CostTable:
    """Measure or estimate every node, in the one process that plans; return an empty table in all others."""
    if not context.backend.is_planner:
        return {}
    if context.backend.has_copies and decision.plan is not None:
        options = replace(options, cost="analytic")  # copies that record later make the same plan, each by itself
    check_stage_count(graph, options.n_stages)
    options.check_names(graph)
    with hint_at_small_microbatches(max(request.counts) if len(request.counts) == 1 else 1, request.samples):
        if decision.plan is None and options.cost != "analytic":
            return _measured(graph, request.candidates, options, context)
        return measure_costs(graph, request.candidates, options)


def _measured(
    graph: TracedGraph, candidates: Sequence[MiniBatch], options: Options, context: CompileContext
) -> CostTable:
    """Measure on the first device. Estimate instead, with a warning and the model where it was, if the model does not fit there."""
    move_back: Callable[[], None] = _nothing
    try:
        move_back = move_model(context.model, options.devices[0])
        return measure_costs(graph, candidates, options)
    except (CostError, torch.OutOfMemoryError) as error:
        if not any(isinstance(one, torch.OutOfMemoryError) for one in (error, error.__cause__)):
            raise
        move_back()
        if options.cost == "profile":
            what = f"the model does not fit on {options.devices[0]}, where its operations are measured"
            raise CostError(what, hint='cost="auto" or cost="analytic" to estimate them') from error
    context.warnings.estimated(options.devices[0])
    return measure_costs(graph, candidates, replace(options, cost="analytic"))


def _nothing() -> None:
    """Leave all tensors where they are."""


def _partition(
    graph: TracedGraph,
    request: CompileRequest,
    options: Options,
    decision: Decision,
    costs: CostTable,
    context: CompileContext,
) -> Planned:
    """Cut the graph in the one process that plans, and share the plan."""
    if not context.backend.is_planner:
        return context.backend.share_plan(None)
    if decision.plan is None and options.has_open_choice:
        return context.backend.share_plan(search_plan(graph, request.candidates, costs, options))
    return context.backend.share_plan(make_plan(graph, request.batch, costs, options))


# -- split, place ---------------------------------------------------------------------------------------------------


def _split(
    graph: TracedGraph, planned: Planned, options: Options, request: CompileRequest, is_given: bool, backend: Backend
) -> tuple[tuple[Route, ...], tuple[Stage, ...]]:
    """Return the routes and the stages of a plan. A plan from the user must fit into the memory."""
    plan = planned.plan
    verify_plan(plan)
    if len(plan.devices) != len(options.devices):
        what = f"the plan is for {counted(len(plan.devices), 'device')}, compile has {len(options.devices)}"
        raise PlanError(what, hint=f"devices= with {len(plan.devices)} of them, or no plan")
    if is_given:
        check_plan_memory(plan, options, len(request.batch.sizes), request.samples)
    stage_of = planned.stage_of or transfer_cut(plan.stage_of, graph, plan.n_stages)
    stage_of = with_left_for_loss(graph, stage_of, plan, options, backend)
    plan_routes = ordered_routes(graph, stage_of, plan.n_stages, planned.samples, in_one_process=backend.holds_model)
    return plan_routes, split(graph, plan_routes, stage_of, [options.devices[device] for device in plan.placement])


def place(
    graph: TracedGraph, stages: Sequence[Stage], plan: Plan, options: Options, context: CompileContext
) -> tuple[Mirrors, DeferredNorms]:
    """Move parameters and buffers, initialise those that were on meta, and defer BatchNorm statistics if asked for."""
    mirrors = context.backend.place(context.model, graph, stages, plan, options, context.homes)
    context.meta_init.fill()
    norms = defer_norms(stages, context.model) if options.batch_norm == "deferred" else DeferredNorms()
    return mirrors, context.backend.deferred_norms(norms)


# -- lines of phases.txt --------------------------------------------------------------------------------------------


def _nodes(graph: TracedGraph) -> str:
    return counted(len(compute_nodes(graph)), "operation")


def _models(table: CostTable) -> str:
    sizes = [samples for samples, costs in table.items() if isinstance(costs, MeasuredCosts)]
    return f"{len(sizes)} micro-batch size" + "s" * (len(sizes) != 1)


def _solution(planned: Planned) -> str:
    plan = planned.plan
    gap = "" if plan.status == "optimal" else f", gap {plan.gap:.2%}"
    return f"{plan.status} cut into {counted(plan.n_stages, 'stage')} by {plan.method}{gap}"


def _crossings(result: tuple[tuple[Route, ...], tuple[Stage, ...]]) -> str:
    plan_routes, stages = result
    return f"{counted(len(stages), 'stage')}, {counted(len(plan_routes), 'route')}"
