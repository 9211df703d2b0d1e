"""The share of each micro-batch in the mini-batch's loss: of its samples, or of what the loss counts.

    labels that count   3, 1, 0 of 4      cross_entropy divides by 4     shares 3/4, 1/4, 0

A loss function is recorded once per kind of call, on outputs of the recorded sizes, to find what it divides by
(loss_divisors.py). One that cannot be analysed is measured (measured_shares.py). If neither finds the shares, one warning says so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

from pipecompile.batching.call_inputs import FlatInputs, flatten_target
from pipecompile.batching.containers import flatten_containers
from pipecompile.batching.merging import MergeKind, MergeRule
from pipecompile.batching.microbatches import LossDivisor, MiniBatch
from pipecompile.driver.measured_shares import MeasuredShares
from pipecompile.driver.specialization import Specialization
from pipecompile.driver.warnings_once import WarningsOnce
from pipecompile.errors import PipecompileError
from pipecompile.graph.batch_flow import BatchFlow
from pipecompile.graph.loss_divisors import divisor_of
from pipecompile.graph.loss_outputs import LossOutputs
from pipecompile.graph.output_merging import join_rules
from pipecompile.ir import TARGET
from pipecompile.options import Options
from pipecompile.runtime.results import own_loss
from pipecompile.tracing.node_facts import value_of
from pipecompile.tracing.recording import record
from pipecompile.tracing.state.snapshot import contents_restored, places_of

__all__ = ["find_divisor"]

Arrivals = Mapping[tuple[str, bool], Any]

_MEAN, _UNKNOWN = MergeRule(MergeKind.AVERAGED), MergeRule(MergeKind.COMPUTED)

Finding = tuple[LossDivisor | None, MergeRule]
"""The divisor of a loss if it has one, and the rule by which losses of micro-batches merge; COMPUTED if that is not known."""


def find_divisor(
    specialization: Specialization,
    batch: MiniBatch,
    target: Any,
    arrivals: Arrivals,
    warnings: WarningsOnce,
    fixed_rules: Callable[[], Sequence[MergeRule]],
) -> LossDivisor | MeasuredShares | None:
    """Return the divisor of the loss of a step; None if shares are those of samples. Warn if neither is right.

    `target` is that of the mini-batch; `arrivals` have the micro-batches of the inputs and of the target. `fixed_rules` gives
    the rules of the outputs of a recording for one batch size.
    """
    options = specialization.options
    if options.loss_fn is None:
        divisor, rule = _of_model(specialization, batch)
    else:
        is_fixed = specialization.facts.batch_size is not None
        flow = None if is_fixed else specialization.flow
        rules = fixed_rules() if flow is None else join_rules(flow)
        outputs = LossOutputs.of(specialization.graph, rules, flow)
        targets = arrivals.get((TARGET, False), (None,))
        divisor, rule = _of_function(options, outputs, targets[0], batch.sizes[0])
        if divisor is None and rule.kind is MergeKind.COMPUTED:
            device = specialization.stage_devices[-1]
            measured = MeasuredShares(options.loss_fn, options.has_aux, outputs, device, warnings.undivided_loss)
            if measured.is_defined(*specialization.step_values(batch, target, arrivals), batch.sizes):
                return measured
    if rule.kind is MergeKind.ADDED:
        warnings.summed()
    elif rule.kind is not MergeKind.AVERAGED and divisor is None:
        warnings.undivided_loss()
    return divisor


def _of_model(specialization: Specialization, batch: MiniBatch) -> Finding:
    """Return the divisor of a loss that the model computes itself."""
    if specialization.facts.batch_size is not None or batch.whole.lists:
        return None, _UNKNOWN
    loss = own_loss(specialization.outputs.example)
    node = specialization.graph.graph.output_node()
    pairs: Any = zip(node.args[0], value_of(node), strict=True)  # type: ignore[arg-type]
    argument = next((a for a, value in pairs if value is loss), None)
    return _found(specialization.flow, argument)


def _found(flow: BatchFlow, loss: Any) -> Finding:
    """Return what is known of a loss in a graph. A constant has no gradient: the step refuses it."""
    if not isinstance(loss, fx.Node) or not value_of(loss).requires_grad:
        return None, _MEAN
    divisor, rule = divisor_of(flow, loss), flow.rule(loss)
    return divisor, (_UNKNOWN if divisor is None and rule.kind not in (MergeKind.ADDED, MergeKind.AVERAGED) else rule)


# -- a loss function --------------------------------------------------------------------------------------------------


class _LossCall(nn.Module):
    """The call of a loss function as a model of the tensors of an output, with the loss as its output."""

    def __init__(self, options: Options, outputs: LossOutputs, samples: int) -> None:
        super().__init__()
        self.loss_fn, self.has_aux = options.loss_fn, options.has_aux
        self.outputs, self.samples = outputs, samples

    def forward(self, tensors: Any, *target: Any) -> Any:
        places = self.outputs.places
        pairs = [(tensor, self.outputs.rules[place].dim) for place, tensor in zip(places, tensors, strict=True)]
        flat = [
            tensor
            if tensor.dim() == len(self.outputs.values[place].shape)
            else tensor.flatten(dim or 0, (dim or 0) + 1)
            for place, (tensor, dim) in zip(places, pairs, strict=True)
        ]
        assert self.loss_fn is not None
        result = self.loss_fn(self.outputs.output(flat, self.samples), *target)
        return result[0] if self.has_aux else result


def _of_function(options: Options, outputs: LossOutputs, target: Any, samples: int) -> Finding:
    """Return the divisor of a loss function, called on an output and the target of a micro-batch of so many samples."""
    if options.batch_dims.get("target") is list or not all(map(outputs.is_usable, outputs.places)):
        return None, _UNKNOWN
    if any(isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)) for value in outputs.values):
        return None, _UNKNOWN
    call = _LossCall(options, outputs, samples)
    try:
        inputs = _inputs(call, target, options, samples)
        with contents_restored(places_of(options.loss_fn)):
            graph = record(call, inputs, torch.device("cpu"))
    except (PipecompileError, TypeError, ValueError, RuntimeError):
        return None, _UNKNOWN
    given = {i: outputs.rules[p] for i, p in enumerate(outputs.places) if outputs.rules[p].kind not in _BY_DIMS}
    results: Any = graph.graph.output_node().args[0]
    divisor, rule = _found(BatchFlow(graph, given), results[0] if len(results) == 1 else None)
    if divisor is None:
        return None, rule
    placeholders = [node.name for node in graph.graph.nodes if node.op == "placeholder"]
    sources = [_source(outputs, placeholders.index(name)) for name in divisor.inputs]
    known = [source for source in sources if source is not None]
    return (divisor.fed_by(known), rule) if len(known) == len(sources) else (None, _UNKNOWN)


_BY_DIMS = (MergeKind.JOINED, MergeKind.SAME)


def _inputs(call: _LossCall, target: Any, options: Options, samples: int) -> FlatInputs:
    """Return the inputs of a recording of the loss: tensors of the output without values, several rows of a sample in a dimension of
    their own, and the target.
    """
    outputs, dims, tensors = call.outputs, [], []
    for place in outputs.places:
        fake, rule = outputs.values[place], outputs.rules[place]
        shape, dim = outputs.shape(place, samples), rule.dim if rule.kind is MergeKind.JOINED else None
        if dim is not None and (rows := outputs.rows(place)) > 1:
            shape[dim : dim + 1] = [samples, rows]
        tensors.append(torch.zeros(shape, dtype=fake.dtype, device="meta").requires_grad_(fake.requires_grad))
        dims.append(dim)
    args: tuple[Any, ...] = (tensors,) if target is None else (tensors, target)
    leaves, spec = flatten_containers((args, {}))
    target_dims = () if target is None else flatten_target(target, options.batch_dims, samples)[2]
    return FlatInputs(call.forward, args, {}, tuple(leaves), spec, (*dims, *target_dims), samples)


def _source(outputs: LossOutputs, index: int) -> LossDivisor | None:
    """Return the computation of an input of a loss: a leaf of the target, or a tensor of the output that inputs decide."""
    if index >= len(outputs.places):
        return LossDivisor((f"{TARGET}:{index - len(outputs.places)}",))
    place = outputs.places[index]
    is_split = outputs.rules[place].kind is MergeKind.JOINED and outputs.rows(place) > 1
    return None if is_split else outputs.known.get(place)
