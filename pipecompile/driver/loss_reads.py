"""Buffers that a loss function reads and that a step writes: a stage may be micro-batches ahead of the loss.

stage 0     F0 writes center    F1 writes center
stage 1                 F0, loss reads center: of micro-batch 0 or 1, as it happens
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import Any

import torch

from pipecompile.batching.merging import MergeKind, MergeRule
from pipecompile.driver.loss_trial import loss_undone
from pipecompile.driver.specialization import Specialization
from pipecompile.errors import InputError
from pipecompile.graph.loss_outputs import LossOutputs
from pipecompile.runtime.cells.recompute import SideEffects
from pipecompile.torch_private.device_functions import to_device
from pipecompile.torch_private.hidden_values import hidden

__all__ = ["refuse_in_list", "refuse_written"]


def _written_before_last(specialization: Specialization) -> dict[torch.Tensor, int]:
    """Return the buffers that stages before the last write, with the number of the stage."""
    stages = specialization.stages[:-1]
    return {buffer: stage.index for stage in stages for buffer in SideEffects.of(stage).written_buffers}


def refuse_written(specialization: Specialization, read: Collection[int], samples: int, target: Any) -> None:
    """Raise InputError if the loss reads a buffer that a stage before the last writes. `read` has ids of tensors that it is known to read.

    The loss is called on zeros for `samples` samples and the target of a micro-batch, and what it writes is undone.
    """
    written = _written_before_last(specialization)
    found = [buffer for buffer in written if id(buffer) in read]

    def note(buffer: torch.Tensor) -> Exception:
        found.append(buffer)
        return RuntimeError("a hidden buffer is read")

    if written and not found:
        device = specialization.stage_devices[-1]
        with suppress(Exception), loss_undone(specialization.options.loss_fn, device), hidden(written, note):
            _call_on_zeros(specialization, samples, target)
    if found:
        raise _refused(specialization, found[0], written[found[0]])


def refuse_in_list(recordings: Sequence[Specialization], sizes: Sequence[int], targets: Sequence[Any]) -> None:
    """Raise InputError if the loss reads such a buffer in a step over a list of micro-batches. Each recording is tried once."""
    for one, samples, target in zip(recordings, sizes, targets, strict=True):
        if len(sizes) > 1 and not one.is_loss_tried and one.options.loss_fn is not None:
            refuse_written(one, (), samples, target)
            one.is_loss_tried = True


def _call_on_zeros(specialization: Specialization, samples: int, target: Any) -> None:
    options, device, graph = specialization.options, specialization.stage_devices[-1], specialization.graph
    arguments: Any = graph.graph.output_node().args[0]
    outputs = LossOutputs.of(graph, [MergeRule(MergeKind.COMPUTED)] * len(arguments))
    tensors = []
    for place in outputs.places:
        value = outputs.values[place]
        zeros = torch.zeros(outputs.shape(place, samples), dtype=value.dtype, device=device)
        tensors.append(zeros.requires_grad_(value.requires_grad))
    targets = [] if target is None else [to_device(target, device)]
    assert options.loss_fn is not None
    options.loss_fn(outputs.output(tensors, samples), *targets)


def _refused(specialization: Specialization, buffer: torch.Tensor, stage: int) -> InputError:
    names = {id(tensor): name for name, tensor in specialization.graph.named_buffers()}
    code = getattr(inspect.unwrap(specialization.options.loss_fn), "__code__", None)  # type: ignore[arg-type]
    return InputError(
        f"the loss reads the buffer {names.get(id(buffer), '')!r}, which stage {stage} writes in the model's forward",
        where=f"{code.co_filename}:{code.co_firstlineno} in {code.co_qualname}" if code else "",
        why=f"stage {stage} may be micro-batches ahead of the loss, as far as the schedule lets it",
        hint="this part of the loss computed in the model's forward; the value returned by forward; or n_microbatches=1",
    )
