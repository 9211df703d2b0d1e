"""The outputs of a specialization for several micro-batches: their merge rules, and the stages that send what is merged.

y departs                    merge rules of the outputs                        the specialization as it is
y departs for y.flip(0)      y is joined, and the tail runs on the whole y     stages without the tail, same cut
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from pipecompile.batching.merging import MergeKind, MergeRule
from pipecompile.batching.microbatches import MiniBatch
from pipecompile.driver.compile_context import CompileContext
from pipecompile.driver.phases import place
from pipecompile.driver.repeated_changes import warn_of_repeated
from pipecompile.driver.specialization import Specialization
from pipecompile.errors import InputError
from pipecompile.graph.batch_decisions import deciding_lines
from pipecompile.graph.batch_flow import BatchFlow
from pipecompile.graph.batch_rows import batch_dim_of
from pipecompile.graph.fixed_batch import UNPROVEN, fixed_rules
from pipecompile.graph.left_rules import LeftRule, fixed_left_rules, left_rules
from pipecompile.graph.module_names import held_tensors
from pipecompile.graph.output_merging import join_rules
from pipecompile.graph.stages import routes, split
from pipecompile.graph.whole_batch import WholeBatchTail, changed_state, mixing_line, shared_draws, tail_refusal
from pipecompile.options import Options
from pipecompile.text.units import counted
from pipecompile.tracing.node_facts import facts, value_of
from pipecompile.tracing.recording import another_size
from pipecompile.tracing.user_source import line_of

__all__ = ["check_whole_size", "fixed_output_rules", "merging_specialization"]


def merging_specialization(
    specialization: Specialization, batch: MiniBatch, options: Options, context: CompileContext
) -> Specialization:
    """Return the specialization whose outputs merge from several micro-batches: the same one, or one whose outputs have a tail.

    Raises InputError if an output can be neither merged nor computed on the whole mini-batch.
    """
    graph = specialization.graph
    if graph.facts.batch_size is not None and any(dim is not None for dim in graph.facts.dims):
        fixed = fixed_output_rules(specialization, batch, options, context)
        if any(rule.reason == UNPROVEN for rule in fixed):
            context.warnings.unproven("its first line")
        return _joined(specialization, fixed, fixed_left_rules(graph), context)
    for line in deciding_lines(graph):
        context.warnings.deciding(line)
    flow = specialization.flow
    arguments: Any = graph.graph.output_node().args[0]
    for node in flow.guesses_before(arguments):
        context.warnings.unproven(line_of(facts(node).source) or node.name)
    rules = _settled(flow, arguments, specialization, context)
    if all(rule.kind is not MergeKind.COMPUTED for rule in rules):
        return _joined(specialization, rules, left_rules(flow), context)
    ends = [node for node, rule in zip(arguments, rules, strict=True) if rule.kind is MergeKind.COMPUTED]
    others = [node for node in arguments if isinstance(node, fx.Node) and node not in ends]
    tail = WholeBatchTail.of(flow, ends, others, specialization.stage_devices[-1])
    _announce(flow, ends, options, context)
    form = _without_tail(specialization, tail, others, options, context)
    return _joined(form, rules, left_rules(flow), context, tail)


def _joined(
    form: Specialization,
    rules: Sequence[MergeRule],
    left: tuple[LeftRule, ...],
    context: CompileContext,
    tail: WholeBatchTail | None = None,
) -> Specialization:
    """Return a specialization, with the merge rules of its outputs and of what it leaves on the model."""
    form.outputs.join(rules, tail)
    form.outputs.left = left
    warn_of_repeated(form.graph, context.model, form.outputs.left, context.warnings)
    return form


def fixed_output_rules(
    specialization: Specialization, batch: MiniBatch, options: Options, context: CompileContext
) -> tuple[MergeRule, ...]:
    """Return the merge rules of the outputs of a recording for one batch size, by a recording of another size."""
    with context.backend.without_collectives(context.model, options):
        other = another_size(context.model, specialization.graph, batch.first, context.meta_init.device)
    return fixed_rules(specialization.graph, other)


def _settled(
    flow: BatchFlow, arguments: Sequence[Any], specialization: Specialization, context: CompileContext
) -> list[MergeRule]:
    """Return the rules of the leaves, with a refusal or a guess for the leaves whose tail cannot run."""
    is_shared = context.backend.holds_model and len(set(specialization.stage_devices)) == 1
    changed, refused = changed_state(specialization.graph), MergeRule(MergeKind.REFUSED, reason=_STATE)
    pairs = zip(arguments, join_rules(flow), strict=True)
    rules = [rule if node not in changed or rule.kind in _BY_ROWS else refused for node, rule in pairs]
    drawn, random = shared_draws(flow), MergeRule(MergeKind.REFUSED, reason=_DRAWN)
    rules = [
        random if isinstance(node, fx.Node) and node in drawn else rule
        for node, rule in zip(arguments, rules, strict=True)
    ]
    for place_, (node, rule) in enumerate(zip(arguments, rules, strict=True)):
        if rule.kind is not MergeKind.COMPUTED or not (why := tail_refusal(flow, [node], is_shared_memory=is_shared)):
            continue
        _, region = flow.region_of([node])
        dim = batch_dim_of(value_of(node), flow.symbol)
        line = mixing_line(flow, node)
        if dim is not None and not any(one in flow.mixing for one in region):
            context.warnings.unproven(line)
            rules[place_] = MergeRule(MergeKind.JOINED, dim)
        else:
            rules[place_] = MergeRule(MergeKind.REFUSED, reason=f"samples meet at {line}; {why}")
    return rules


_BY_ROWS = (MergeKind.JOINED, MergeKind.SAME, MergeKind.COMPUTED, MergeKind.REFUSED)
_DRAWN = "it is a random value that all samples share, and every micro-batch draws its own"
_STATE = "it is computed from state of the model that every micro-batch changes"


def _announce(flow: BatchFlow, ends: Sequence[fx.Node], options: Options, context: CompileContext) -> None:
    """Warn if the tail has parameters: it is then a part of the model that does not run in stages."""
    _, region = flow.region_of(ends)
    if any(isinstance(tensor, torch.nn.Parameter) for node in region for tensor in held_tensors(flow.graph, node)):
        context.warnings.outside_stages(mixing_line(flow, ends[0]), len(region), options)


def _without_tail(
    specialization: Specialization,
    tail: WholeBatchTail,
    others: Sequence[fx.Node],
    options: Options,
    context: CompileContext,
) -> Specialization:
    """Return the specialization with stages that leave the tail out and send what the tail needs."""
    graph, plan = specialization.graph, specialization.plan
    stage_of = {name: s.index for s in specialization.stages for name in s.nodes if name in tail.rest}
    plan_routes = routes(graph, stage_of, outputs={*tail.departing, *others})
    stages = split(graph, plan_routes, stage_of, specialization.stage_devices)
    mirrors, norms = place(graph, stages, plan, options, context)
    executable = context.backend.executable(mirrors)
    return replace(
        specialization, routes=plan_routes, stages=stages, mirrors=mirrors, norms=norms, executable=executable,
        executables={}, schedules={}, merging=None, _codes=(),
    )  # fmt: skip


def check_whole_size(specialization: Specialization, samples: int, context: CompileContext) -> None:
    """Warn if the micro-batches of a call take another way at a branch than this number of samples at once would.

    Raise InputError if the outputs have a tail: it was recorded for the sizes of micro-batches.
    """
    guard = specialization.broken_guard((samples,))
    if guard is None or specialization.graph.facts.batch_size is not None:
        return
    if specialization.outputs.tail is None:
        context.warnings.whole(guard, samples)
        return
    raise InputError(
        "the model's output cannot be put together from micro-batches",
        where=f"{guard.place}, and a mini-batch of {counted(samples, 'sample')}",
        why=f"a part of it needs the whole mini-batch, and the model branches on the batch size: {guard}",
        hint="n_microbatches=1",
    )
