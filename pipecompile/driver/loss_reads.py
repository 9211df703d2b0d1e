"""Tensors that a loss function reads and a stage writes, or the other way round: a stage may be micro-batches ahead of the loss.

stage 0     F0 writes center    F1 writes center
stage 1                 F0, loss reads center: of micro-batch 0 or 1, as it happens
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import chain
from typing import Any

import torch

from pipecompile.batching.containers import copied, on_device
from pipecompile.batching.merging import MergeKind, MergeRule
from pipecompile.driver.loss_trial import loss_undone
from pipecompile.driver.specialization import Specialization
from pipecompile.errors import InputError, RecordingWarning
from pipecompile.graph.loss_outputs import LossOutputs
from pipecompile.runtime.cells.side_effects import SideEffects
from pipecompile.settings.direction_choice import copies_of_stages
from pipecompile.torch_private.hidden_values import hidden
from pipecompile.torch_private.storages import memory_state
from pipecompile.tracing.state.effect_places import EffectPlace
from pipecompile.tracing.state.function_state import reads_objects, tensors_near
from pipecompile.tracing.state.loss_bindings import bound_by_loss
from pipecompile.tracing.state.preserved_run import state_tensors
from pipecompile.tracing.state.signal_errors import signal_errors_kept
from pipecompile.tracing.user_source import warn

__all__ = ["refuse_in_list", "refuse_written", "warn_of_left"]


def _written_before_last(specialization: Specialization) -> dict[torch.Tensor, int]:
    """Return the buffers that stages before the last write, with the number of the stage."""
    stages = specialization.stages[:-1]
    return {buffer: stage.index for stage in stages for buffer in SideEffects.of(stage).written_buffers}


def _used_before_last(specialization: Specialization) -> dict[torch.Tensor, int]:
    """Return the tensors that stages before the last use, and the loss could write, with the number of the stage."""
    stages, reached = specialization.stages[:-1], tensors_near(specialization.options.loss_fn)
    pairs = [(tensor, stage.index) for stage in reversed(stages) for tensor in state_tensors(stage.module)]
    return {tensor: stage for tensor, stage in pairs if id(tensor) in reached and not tensor.is_inference()}


@signal_errors_kept()
def refuse_written(specialization: Specialization, read: Collection[int], samples: int, target: Any) -> None:
    """Raise InputError if the loss reads a buffer that a stage before the last writes, or writes a tensor that such a stage uses.
    `read` has ids of tensors that it is known to read.

    The loss is called on zeros for `samples` samples and the target of a micro-batch, and what it writes is undone.
    """
    written, used = _written_before_last(specialization), _used_before_last(specialization)
    found = [buffer for buffer in written if id(buffer) in read]
    changed: list[torch.Tensor] = []

    def note(buffer: torch.Tensor) -> Exception:
        found.append(buffer)
        return RuntimeError("a hidden buffer is read")

    _warn_of_python(specialization)
    if (written or used) and not found:
        undone = loss_undone(specialization.options.loss_fn, specialization.stage_devices[-1])
        with suppress(Exception), undone, hidden(written, note), _writes_noted(used, changed):
            _call_on_zeros(specialization, samples, target)
    if found:
        raise _refused(specialization, found[0], written[found[0]], "reads", "writes", _READ_IN_FORWARD)
    if changed:
        raise _refused(specialization, changed[0], used[changed[0]], "writes", "reads", _WRITE_IN_FORWARD)


def _warn_of_python(specialization: Specialization) -> None:
    """Warn if the loss may read what an earlier stage leaves in objects, beside tensors in attributes, and that stage may run ahead."""
    threaded, placement = specialization.options.dispatch == "threads", specialization.plan.placement
    loss, effects = specialization.options.loss_fn, [SideEffects.of(stage) for stage in specialization.stages[:-1]]
    is_shared = len({*placement}) < len(placement) or copies_of_stages(specialization.options) > 1
    if not (threaded or is_shared) or not reads_objects(loss):
        return
    places = [place for one in effects for place in one.places]
    if any(one.runs_python for one in effects) or (places and any(map(_may_differ(bound_by_loss(loss)), places))):
        warn(_AHEAD.format(*(_IN_THREADS if threaded else _IN_TURNS)), RecordingWarning)


def _may_differ(bound: Collection[str]) -> Callable[[EffectPlace], bool]:
    """Return whether the loss may find a place as a later micro-batch has left it, if it binds attributes of these names.

    Of a tensor in an attribute it finds that of its own micro-batch, unless it has put something else there.
    """
    return lambda place: place.is_count or not place.is_attribute or place.key in bound


_AHEAD = (
    "stages before the last leave something in objects, and the loss reads objects beside its arguments: numbers, lists and dicts "
    "there may be those of another micro-batch, because {} lets these stages run ahead. Try {}; or return them from forward"
)
_IN_THREADS = "dispatch='threads'", "dispatch='inline'"
_IN_TURNS = "a device with several stages", "a device for each stage, as devices=['cpu'] * n_stages"


def warn_of_left(specialization: Specialization) -> None:
    """Warn if a loss of the whole mini-batch may read what stages leave in objects: these are of the last micro-batch."""
    if specialization.is_loss_tried:
        return
    specialization.is_loss_tried = True
    effects = map(SideEffects.of, specialization.stages)
    if reads_objects(specialization.options.loss_fn) and any(one.leaves_values for one in effects):
        warn(_OF_THE_LAST, RecordingWarning)


_OF_THE_LAST = (
    "the loss is that of the whole mini-batch and reads objects beside its arguments: what the forward left there is of the last "
    "micro-batch alone. Return it from forward"
)


@contextmanager
def _writes_noted(tensors: Collection[torch.Tensor], changed: list[torch.Tensor]) -> Iterator[None]:
    """Append to `changed` the tensors that are written in this context."""
    states = [(tensor, memory_state(tensor)) for tensor in tensors]
    try:
        yield
    finally:
        changed += [tensor for tensor, state in states if memory_state(tensor) != state]


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
        tensors.append(zeros.requires_grad_(value.requires_grad).clone())  # the loss may write into what it gets
    targets = [] if target is None else [copied(on_device(target, device))]
    assert options.loss_fn is not None
    options.loss_fn(outputs.output(tensors, samples), *targets)


def _refused(
    specialization: Specialization, tensor: torch.Tensor, stage: int, by_loss: str, by_stage: str, hint: str
) -> InputError:
    """Return the error of a tensor that the loss reads and a stage writes, or the other way round, as the two verbs say."""
    graph = specialization.graph
    names = {id(one): name for name, one in chain(graph.named_buffers(), graph.named_parameters())}
    kind = "parameter" if isinstance(tensor, torch.nn.Parameter) else "buffer"
    code = getattr(inspect.unwrap(specialization.options.loss_fn), "__code__", None)  # type: ignore[arg-type]
    return InputError(
        f"the loss {by_loss} the {kind} {names.get(id(tensor), '')!r}, which stage {stage} {by_stage} in the model's forward",
        where=f"{code.co_filename}:{code.co_firstlineno} in {code.co_qualname}" if code else "",
        why=f"stage {stage} may be micro-batches ahead of the loss, as far as the schedule lets it",
        hint=hint,
    )


_READ_IN_FORWARD = (
    "this part of the loss computed in the model's forward; the value returned by forward; or n_microbatches=1"
)
_WRITE_IN_FORWARD = "this write in the model's forward, or after the step; or n_microbatches=1"
