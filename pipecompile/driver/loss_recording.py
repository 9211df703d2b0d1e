"""The recording of a loss function: the loss as a graph of the tensors of an output and of the target."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from pipecompile.batching.call_inputs import FlatInputs, flatten_target
from pipecompile.batching.containers import flatten_containers
from pipecompile.batching.merging import MergeKind
from pipecompile.errors import InputError, PipecompileError
from pipecompile.graph.loss_outputs import LossOutputs
from pipecompile.options import Options
from pipecompile.tracing.recording import record
from pipecompile.tracing.state.function_state import function_restored
from pipecompile.tracing.state.muted_output import output_muted
from pipecompile.tracing.state.signal_errors import signal_errors_kept
from pipecompile.tracing.traced_graph import TracedGraph
from pipecompile.tracing.user_source import muted

__all__ = ["record_loss"]


@signal_errors_kept()
def record_loss(options: Options, outputs: LossOutputs, target: Any, samples: int) -> TracedGraph | None:
    """Return the graph of the loss function, called on an output and the target of a micro-batch of `samples` samples; None if it cannot be
    recorded.
    """
    if options.batch_dims.get("target") is list or not all(map(outputs.is_recordable, outputs.places)):
        return None
    if any(isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)) for value in outputs.values):
        return None
    call = _LossCall(options, outputs, samples)
    try:
        inputs = _inputs(call, target, options, samples)
        with function_restored(options.loss_fn, tensors=False), muted(), output_muted():
            return record(call, inputs, torch.device("cpu"))
    except (PipecompileError, TypeError, ValueError, RuntimeError):
        return None


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
        loss = result[0] if self.has_aux else result
        return loss.clone() if any(loss is tensor for tensor in flat) else loss  # a graph has an operation


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
    try:
        target_dims = () if target is None else flatten_target(target, options.batch_dims, samples)[2]
    except InputError:  # the target of a micro-batch that is not cut may have any sizes
        target_dims = (None,) * len(flatten_containers(target)[0])
    return FlatInputs(call.forward, args, {}, tuple(leaves), spec, (*dims, *target_dims), samples)
