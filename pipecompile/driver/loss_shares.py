"""The share of each micro-batch in the mini-batch's loss: of its samples, or of what the loss counts.

    labels that count   3, 1, 0 of 4      cross_entropy divides by 4     shares 3/4, 1/4, 0

A loss function is recorded once per kind of call, on outputs of the recorded sizes, to find what it divides by
(loss_divisors.py). One that cannot be analysed is measured (measured_shares.py). If neither finds the shares, one warning says so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cache, partial
from itertools import chain
from typing import Any

from torch import fx

from pipecompile.batching.merging import MergeKind, MergeRule
from pipecompile.batching.microbatches import LossDivisor, MiniBatch
from pipecompile.driver.backend import Backend
from pipecompile.driver.compile_context import CompileContext
from pipecompile.driver.left_on_ranks import warn_of_ranks
from pipecompile.driver.loss_analysis import UNKNOWN, WITHOUT_DIVISOR, LossAnalysis, no_count
from pipecompile.driver.loss_reads import refuse_written
from pipecompile.driver.loss_recording import record_loss
from pipecompile.driver.measured_shares import MeasuredShares
from pipecompile.driver.model_losses import analyse_numbers
from pipecompile.driver.specialization import Specialization
from pipecompile.driver.target_values import target_kind
from pipecompile.driver.warnings_once import WarningsOnce
from pipecompile.graph.batch_flow import BatchFlow
from pipecompile.graph.loss_counts import loss_count
from pipecompile.graph.loss_divisors import divisor_of, meeting_before
from pipecompile.graph.loss_outputs import LossOutputs
from pipecompile.graph.output_merging import join_rules, rows_by_shape, shape_rules
from pipecompile.graph.whole_batch import meeting_line
from pipecompile.ir import TARGET
from pipecompile.options import Options
from pipecompile.runtime.results import own_loss
from pipecompile.tracing.node_facts import value_of
from pipecompile.tracing.traced_graph import TracedGraph

__all__ = ["COUNTED", "find_count", "find_loss", "weigh_copy"]

Arrivals = Mapping[tuple[str, bool], Any]

_MEAN = MergeRule(MergeKind.AVERAGED)


_ADDED = LossAnalysis(None, MergeRule(MergeKind.ADDED))
"""The analysis of a loss that was declared a sum."""

_ANALYSED_AT_MOST = 3
"""Analyses of a loss function that changes; from then on its shares are measured in every step."""

_KEPT = 64
"""Kinds of targets whose analyses are kept."""


def find_loss(
    specialization: Specialization,
    batch: MiniBatch,
    target: Any,
    arrivals: Arrivals,
    warnings: WarningsOnce,
    fixed_rules: Callable[[], Sequence[MergeRule]],
    backend: Backend,
) -> LossAnalysis:
    """Return the analysis of the loss of a step, without a divisor if shares are those of samples. Warn if neither is right. Raise
    InputError if the loss reads a buffer that a stage before the last writes.

    `target` is that of the mini-batch; `arrivals` have the micro-batches of the inputs and of the target. `fixed_rules` gives
    the rules of the outputs of a recording for one batch size. `backend` has the values that the loss reads.
    """
    options, key = specialization.options, target_kind(target)
    before, forget = specialization.losses.get(key), partial(specialization.losses.pop, key, None)
    changes = max(len(specialization.losses), 0 if before is None else before.changes + 1)
    if len(specialization.losses) >= _KEPT:
        del specialization.losses[next(iter(specialization.losses))]
    is_mean, part = options.loss_reduction == "mean", arrivals.get((TARGET, False), (None,))[0]
    analysis, outputs = _analysed(specialization, batch, arrivals, warnings, fixed_rules) if is_mean else (_ADDED, None)
    if options.loss_fn is not None:
        refuse_written(specialization, analysis.weights, batch.sizes[0], part)
        if not backend.holds_model:
            warn_of_ranks(specialization)
    if not is_mean:
        return analysis
    analysis = replace(analysis, changes=changes)
    is_measured = analysis.is_unknown or changes >= _ANALYSED_AT_MOST
    if outputs is not None and outputs.has_gradients_merged and is_measured:
        values = partial(backend.loss_values, analysis.weights)
        measured = _measured(specialization, outputs, partial(warnings.undivided_loss, forget), values)
        if measured.is_defined(*specialization.step_values(batch, target, arrivals), batch.sizes):
            return replace(analysis, divisor=measured, guards=None)
    _warn(analysis, options, warnings, forget)
    return analysis


def _warn(analysis: LossAnalysis, options: Options, warnings: WarningsOnce, forget: Callable[[], object]) -> None:
    """Warn of a loss that is a sum, that was not recognised, or before which samples meet."""
    if analysis.rule.kind is MergeKind.ADDED:
        warnings.summed()
    elif analysis.is_unknown:
        warnings.undivided_loss(forget, analysis.line)
    elif analysis.line and options.across_batch is None:
        warnings.mixed([analysis.line])


def _measured(
    specialization: Specialization,
    outputs: LossOutputs,
    warn: Callable[[], None],
    values: Callable[[], AbstractContextManager[None]],
) -> MeasuredShares:
    options, device = specialization.options, specialization.stage_devices[-1]
    return MeasuredShares(options.loss_fn, options.has_aux, outputs, device, warn, values)  # type: ignore[arg-type]


COUNTED = "what the loss counts"
"""The unit in which copies of a pipeline are weighted where a loss does not divide by samples."""


def weigh_copy(
    specialization: Specialization, batch: MiniBatch, target: Any, arrivals: Arrivals, context: CompileContext
) -> None:
    """Say what the loss of this copy of the pipeline counts, if not samples. Warn if that is not known.

    `context.backend` computes the share of this copy from the counts of all.
    """
    key = target_kind(target)
    analysis = specialization.losses.get(key)
    if analysis is None or analysis.divisor is None:
        return
    if not specialization.is_current(specialization.counts.get(key)):
        specialization.counts[key] = find_count(specialization, batch, arrivals.get((TARGET, False), (None,))[0])
    if (count := specialization.counts[key].count()) is None:
        context.warnings.uncounted_copies()
    else:
        counted = count.of(specialization.whole_values(batch, target), sum(batch.sizes))
        context.backend.weigh(float(counted), COUNTED, count.floor)


def find_count(specialization: Specialization, batch: MiniBatch, target: Any) -> LossAnalysis:
    """Return the analysis of the loss of a micro-batch that is not cut, for its count."""
    if specialization.options.loss_fn is None:
        analysis = _of_model(specialization, batch)
    else:
        graph = specialization.graph
        outputs = LossOutputs.of(graph, _rules_of_one(graph))
        analysis = _of_function(specialization, outputs, target, batch)
    return replace(analysis, count=cache(analysis.count))


def _rules_of_one(graph: TracedGraph) -> list[MergeRule]:
    """Return rules of the output of one micro-batch: rows by shape, and no rule for numbers with a gradient, which samples may enter."""
    pairs = zip(value_of(graph.graph.output_node()), shape_rules(graph), strict=True)
    return [UNKNOWN if getattr(value, "requires_grad", False) and not value.dim() else rule for value, rule in pairs]


def _analysed(
    specialization: Specialization,
    batch: MiniBatch,
    arrivals: Arrivals,
    warnings: WarningsOnce,
    fixed_rules: Callable[[], Sequence[MergeRule]],
) -> tuple[LossAnalysis, LossOutputs | None]:
    """Return what is known of the loss, and the outputs that a loss function takes if they merge. Warn if samples meet before."""
    options = specialization.options
    if options.loss_fn is None:
        return _of_model(specialization, batch), None
    is_fixed = specialization.facts.batch_size is not None
    rules = fixed_rules() if is_fixed else join_rules(specialization.flow)
    outputs = LossOutputs.of(specialization.graph, rules if is_fixed else rows_by_shape(specialization.graph, rules))
    targets = arrivals.get((TARGET, False), (None,))
    line = "" if is_fixed else _line_before_outputs(specialization.flow, rules)
    if line and options.across_batch is None:
        warnings.mixed([line])
    return _of_function(specialization, outputs, targets[0], batch), outputs


def _line_before_outputs(flow: BatchFlow, rules: Sequence[MergeRule]) -> str:
    """Return the user's line at which samples meet before an output that has a gradient; "" if they do not.

    Numbers are left out: a loss function that takes them is analysed with what computes them.
    """
    arguments: Any = flow.graph.graph.output_node().args[0]
    ends = [
        node
        for node, rule in zip(arguments, rules, strict=True)
        if rule.kind is MergeKind.COMPUTED and getattr(value_of(node), "requires_grad", False) and value_of(node).dim()
    ]
    return next((line for node in ends if (line := meeting_line(flow, node))), "")


def _of_model(specialization: Specialization, batch: MiniBatch) -> LossAnalysis:
    """Return the divisor of a loss that the model computes itself."""
    loss = own_loss(specialization.outputs.example)
    node = specialization.graph.graph.output_node()
    pairs: Any = zip(node.args[0], value_of(node), strict=True)  # type: ignore[arg-type]
    argument = next((a for a, value in pairs if value is loss), None)
    if specialization.facts.batch_size is not None or batch.whole.lists:
        count = partial(loss_count, specialization.graph, argument) if isinstance(argument, fx.Node) else no_count
        return LossAnalysis(None, UNKNOWN, count)
    return _found(specialization.flow, argument)


def _found(flow: BatchFlow, loss: Any) -> LossAnalysis:
    """Return what is known of a loss in a graph. A constant has no gradient: the step refuses it."""
    if not isinstance(loss, fx.Node) or not value_of(loss).requires_grad:
        return LossAnalysis(None, _MEAN)
    divisor, rule = divisor_of(flow, loss), flow.rule(loss)
    count = partial(loss_count, flow.graph, loss)
    if divisor is not None:
        return LossAnalysis(divisor, rule, count, meeting_before(flow, loss))
    if rule.kind in WITHOUT_DIVISOR:
        return LossAnalysis(None, rule, count)
    return LossAnalysis(None, UNKNOWN, count, meeting_line(flow, loss))


# -- a loss function --------------------------------------------------------------------------------------------------


def _of_function(specialization: Specialization, outputs: LossOutputs, target: Any, batch: MiniBatch) -> LossAnalysis:
    """Return the divisor of a loss function, called on an output and the target of the first micro-batch."""
    options = specialization.options
    graph = record_loss(options, outputs, target, batch.sizes[0])
    if graph is None:
        return LossAnalysis(None, UNKNOWN)
    given = {i: outputs.rules[p] for i, p in enumerate(outputs.places) if outputs.rules[p].kind not in _BY_DIMS}
    results: Any = graph.graph.output_node().args[0]
    flow, loss = BatchFlow(graph, given), results[0] if len(results) == 1 else None
    places = {node.name: place for place, node in enumerate(graph.graph.find_nodes(op="placeholder"))}
    found = analyse_numbers(specialization, outputs, flow, loss, batch) or _of_graph(outputs, flow, loss, places)
    reads = graph.facts.reads
    guards = replace(reads, others=(("loss_fn", options.loss_fn),)).guards() if reads else None
    weights = frozenset(map(id, chain(graph.parameters(), graph.buffers())))
    return replace(found, guards=guards, weights=weights)


def _of_graph(outputs: LossOutputs, flow: BatchFlow, loss: Any, places: Mapping[str, int]) -> LossAnalysis:
    """Return what is known of a loss that its function computes from the output and the target."""
    own = _found(flow, loss)
    assert not isinstance(own.divisor, MeasuredShares)
    divisor = None if own.line else _fed(own.divisor, outputs, places)
    rule = own.rule if own.divisor is None or divisor is not None else UNKNOWN
    return replace(own, divisor=divisor, rule=rule, count=lambda: _fed(own.count(), outputs, places))


def _fed(divisor: LossDivisor | None, outputs: LossOutputs, places: Mapping[str, int]) -> LossDivisor | None:
    """Return a divisor computed from the inputs of the model and the target; None if other values enter."""
    if divisor is None or not divisor.inputs:
        return divisor
    sources = [_source(outputs, places[name]) for name in divisor.inputs]
    known = [source for source in sources if source is not None]
    return divisor.fed_by(known) if len(known) == len(sources) else None


_BY_DIMS = (MergeKind.JOINED, MergeKind.SAME)


def _source(outputs: LossOutputs, index: int) -> LossDivisor | None:
    """Return the computation of an input of a loss: a leaf of the target, or a tensor of the output that inputs decide."""
    if index >= len(outputs.places):
        return LossDivisor((f"{TARGET}:{index - len(outputs.places)}",))
    place = outputs.places[index]
    is_split = outputs.rules[place].kind is MergeKind.JOINED and outputs.rows(place) > 1
    return None if is_split else outputs.known.get(place)
