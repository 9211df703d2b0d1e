"""The stages of a model on slices of a sequence: a recording of one slice, cut as that of whole micro-batches, with attention over
all slices so far.

recorded for a whole sequence      q (B, 4, 64, 8)  attention(q, k, v, is_causal=True)    arange(64)
recorded for a slice               q (B, 4, 16, 8)  attention(q, k, v, is_causal=True)    arange(16)
as it runs                         SlicedAttention: keys and values of earlier slices     arange(16) + offset
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import fx, nn

from pipecompile.batching.slices_of_batch import SlicedBatch
from pipecompile.driver.compile_context import CompileContext
from pipecompile.driver.phases import place
from pipecompile.driver.specialization import Specialization
from pipecompile.errors import PlanError, TraceError
from pipecompile.graph.colocation import note_ties
from pipecompile.graph.left_order import ordered_routes
from pipecompile.graph.sequence_flow import SequenceFlow
from pipecompile.graph.stages import Stage, split
from pipecompile.runtime.cells.sliced import SlicedAttention, SlicedPositions, SlicedRows, SliceState
from pipecompile.tracing.guards.lifted_state import NOTHING_LIFTED
from pipecompile.tracing.node_facts import has_regions
from pipecompile.tracing.recording import record
from pipecompile.tracing.traced_graph import TracedGraph

__all__ = ["SlicedStages", "slice_stages"]


@dataclass(frozen=True, slots=True)
class SlicedStages:
    """The specialization of slices, and what the attentions and positions of each of its stages read. `length` counts positions."""

    specialization: Specialization
    flow: SequenceFlow
    states: tuple[SliceState, ...]
    length: int


def slice_stages(specialization: Specialization, batch: SlicedBatch, context: CompileContext) -> SlicedStages:
    """Return the stages of a specialization for slices. Raise PlanError if the model cannot run on slices."""
    whole, plan = specialization.graph, specialization.plan
    if whole.facts.kept or has_regions(whole.graph.nodes):
        raise _refusal(is_kept=bool(whole.facts.kept))
    graph = _recorded(specialization, batch, context)
    flow = SequenceFlow(graph, whole, batch.n_slices, batch.length)
    stage_of = {name: stage.index for stage in specialization.stages for name in stage.nodes}
    _drop_masks(graph, flow)
    whole_bytes = {route.value: route.nbytes for route in specialization.routes}
    crossing = ordered_routes(graph, stage_of, plan.n_stages, in_one_process=context.backend.holds_model)
    plan_routes = tuple(replace(route, nbytes=whole_bytes.get(route.value, route.nbytes)) for route in crossing)
    stages = split(graph, plan_routes, stage_of, specialization.stage_devices)
    states = tuple(_rewritten(stage, flow, batch.length) for stage in stages)
    mirrors, norms = place(graph, stages, plan, specialization.options, context)
    form = replace(
        specialization, graph=graph, routes=plan_routes, stages=stages, mirrors=mirrors, norms=norms,
        executable=context.backend.executable(mirrors), executables={}, schedules={}, merging=None, losses={},
        counts={}, slicing={}, states=states, _codes=(), _flow=None,
    )  # fmt: skip
    return SlicedStages(form, flow, states, batch.length)


def _recorded(specialization: Specialization, batch: SlicedBatch, context: CompileContext) -> TracedGraph:
    """Return the recording of a slice. Raise PlanError if the model, which runs on whole micro-batches, fails on the slice."""
    lifted = specialization.guards.lifted if specialization.guards else NOTHING_LIFTED
    try:
        with context.backend.without_collectives(context.model, specialization.options):
            return note_ties(record(context.model, batch.first, context.meta_init.device, lifted))
    except TraceError as error:
        raise PlanError(
            "the model cannot run on slices of a sequence: its forward fails on a slice",
            where=error.where,
            why=f"slices are cut along dimension 1, here {batch.length} of {batch.length * batch.n_slices} positions:"
            f" {error.what.removeprefix('cannot trace: ')}",
            hint='schedule="1f1b", unless dimension 1 of the inputs is a sequence and the forward takes any length of it',
        ) from error


def _refusal(*, is_kept: bool) -> PlanError:
    what, why = "it has a part that is kept whole", "what the part does with positions is not known"
    hint = 'schedule="1f1b"'
    if not is_kept:
        what, why = (
            "it calls torch.utils.checkpoint",
            "a recomputed part would not find the keys and values of its slice",
        )
        hint = 'no torch.utils.checkpoint in the model, and checkpoint="always" of compile'
    return PlanError(f"the model cannot run on slices of a sequence: {what}", why=why, hint=hint)


def _drop_masks(graph: TracedGraph, flow: SequenceFlow) -> None:
    """Leave out the masks of causal attentions, and the constants that nothing else reads."""
    for node in flow.attentions:
        options = {name: value for name, value in node.kwargs.items() if name in ("scale", "enable_gqa")}
        node.args, node.kwargs = node.args[:3], {**options, "is_causal": True}
    for node in reversed(graph.graph.nodes):
        if not node.users and node in flow.constants:
            graph.graph.erase_node(node)
    graph.recompile()


def _rewritten(stage: Stage, flow: SequenceFlow, length: int) -> SliceState:
    """Replace, in a stage, what depends on the place of a slice by layers that read it from the state that is returned."""
    state, module, graph = SliceState(length), stage.module, stage.module.graph
    attentions, positions, tables = (
        {node.name for node in nodes} for nodes in (flow.attentions, flow.positions, flow.tables)
    )
    dims = {node.name: dim for node, dim in flow.tables.items()}
    for node in [node for node in graph.nodes if node.op != "placeholder"]:
        if node.name in attentions:
            query, key, value = node.args[:3]
            options = {name: value for name, value in node.kwargs.items() if name in ("scale", "enable_gqa")}
            _replace(module, node, SlicedAttention(state), (query, key, value), options)
        elif node.name in positions:
            with graph.inserting_after(node):
                _insert_after(module, node, SlicedPositions(state))
        elif node.name in tables:
            _replace(module, node, SlicedRows(state, dims[node.name]), node.args[:1], {})
    graph.lint()
    module.recompile()
    return state


def _replace(
    module: fx.GraphModule,
    node: fx.Node,
    layer: nn.Module,
    args: Sequence[fx.node.Argument],
    kwargs: dict[str, fx.node.Argument],
) -> None:
    with module.graph.inserting_before(node):
        other = module.graph.call_module(_added(module, layer), tuple(args), kwargs)
    other.meta = dict(node.meta)
    node.replace_all_uses_with(other)
    module.graph.erase_node(node)


def _insert_after(module: fx.GraphModule, node: fx.Node, layer: nn.Module) -> None:
    other = module.graph.call_module(_added(module, layer), (node,))
    other.meta = dict(node.meta)
    node.replace_all_uses_with(other, delete_user_cb=lambda user: user is not other)


def _added(module: fx.GraphModule, layer: nn.Module) -> str:
    """Return the name of a new child of a stage."""
    number = sum(name.startswith("of_slice_") for name, _ in module.named_children())
    module.add_submodule(f"of_slice_{number}", layer)
    return f"of_slice_{number}"
