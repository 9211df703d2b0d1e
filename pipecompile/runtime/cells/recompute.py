"""Recomputation: a forward that keeps only how to run it again, and the recomputation that restores what it did not keep.

    F   inputs ─► stage ─► outputs             keeps a recipe: random state, autocast, buffers and inputs that the stage writes
    R   inputs, recipe ─► stage ─► @s          the same numbers from the same calls; the outputs are dropped

F records an autograd graph as any forward does, and drops it at its end. So the same kernels run, and the outputs have the right
`requires_grad`. The dropped graph does not raise the memory peak, since R holds as much later.

R starts from the buffers as F found them, and restores those that R itself found: running statistics are updated once. While R
runs, `is_recomputing()` is true. Changes by user code since F are undone while R runs. State that the last stage stores on the
model is written again, because the loss may read it, and restored at the end of R.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from pipecompile.batching.containers import copied
from pipecompile.runtime.cells.forward_backward import Function, SavedGraph, forward_with_graph, make_leaves
from pipecompile.runtime.cells.gradient_layouts import Layout
from pipecompile.runtime.cells.kept_gradients import KeptTensor, kept_gradients_noted, pass_on, references
from pipecompile.runtime.cells.loss_arguments import unwritten
from pipecompile.runtime.cells.loss_writes import copying_forward
from pipecompile.runtime.cells.saved_state import flags_restored, state_copied, user_hooks_shielded, write_buffers
from pipecompile.runtime.cells.side_effects import SideEffects
from pipecompile.runtime.registers import Frame, Run
from pipecompile.torch_private.accelerators import random_state, set_random_state
from pipecompile.torch_private.modes import is_any_autocast_enabled
from pipecompile.torch_private.storages import preserve_versions
from pipecompile.tracing.recompute_flag import first_of_two_runs, recomputation
from pipecompile.tracing.state.change_log import Change, ChangeLog
from pipecompile.tracing.state.effect_places import restored_places
from pipecompile.tracing.state.muted_output import output_muted
from pipecompile.tracing.state.random_states import (
    RANDOM_LOCK,
    RandomSource,
    RandomStates,
    generator_sources,
    generators_among,
)
from pipecompile.tracing.state.tensor_contents import moved_memory, put_memory_back

__all__ = ["Recipe", "StageRun", "checkpointed_cell", "kept_apart", "recompute_cell"]

_Random = tuple[dict[torch.device, torch.Tensor], RandomStates]
"""States of the generators of the CPU and of the device, and of the generators of Python and of generator objects."""

Autocast = tuple[tuple[str, torch.dtype, bool], ...]
"""(device type, dtype, is enabled) per device type; empty if autocast is enabled for none."""


@dataclass(slots=True)
class Recipe:
    """State in which a forward began: random state, autocast, buffers, the inputs that it then wrote, by place, the numbers
    of the model that it read, by label, what was where its effect nodes write, whether the tensors whose `requires_grad` it sets
    required gradients, what user code changed since, and the tensors whose gradients it asked for.
    """

    random: _Random | None
    autocast: Autocast
    buffers: list[torch.Tensor]
    inputs: dict[int, torch.Tensor]
    numbers: dict[str, Any]
    left: list[Any]
    flags: list[bool]
    change: Change | None = None
    kept: Sequence[KeptTensor] = ()


@dataclass(frozen=True, slots=True)
class StageRun:
    """A stage's function on a device. `size_of` is the micro-batch whose size (samples) is the last argument; None for no size.

    `known` are layouts of inputs of which gradients come in the strides of the input.
    """

    function: Function
    size_of: int | None
    effects: SideEffects
    device: torch.device
    log: ChangeLog | None = None
    known: set[Layout] = field(default_factory=set)

    def forward(self, frame: Frame, values: list[Any]) -> Sequence[Any]:
        """Return the outputs, and keep nothing."""
        make_leaves(values, casts=self.effects.casts)
        return self.function(*values, *self._size(frame))

    def recorded(self, frame: Frame, values: list[Any]) -> SavedGraph:
        """Run the forward and return what its backward needs."""
        size, casts = self._size(frame), self.effects.casts
        return forward_with_graph(self.function, values, size, casts=casts, known=self.known)[1]

    def noted(self) -> AbstractContextManager[Change | None]:
        """Return the context of a forward whose changes a recomputation may have to undo."""
        if self.log is None or not self.effects.is_stateful:
            return _UNCHANGED
        return self.log.noted(self.effects.state_holders)

    def undone(self, change: Change | None) -> AbstractContextManager[list[torch.Tensor]]:
        """Return the context of a recomputation: a change and all later ones are undone, if user code may see them. It yields
        the tensors that these wrote.
        """
        if self.log is None or change is None or not self.effects.holders:
            return nullcontext([])
        return self.log.undone(change)

    def _size(self, frame: Frame) -> tuple[int, ...]:
        return () if self.size_of is None else (frame.sizes[self.size_of],)

    @property
    def device_types(self) -> tuple[str, ...]:
        """Device types whose autocast applies."""
        return ("cpu",) if self.device.type == "cpu" else ("cpu", self.device.type)


def checkpointed_cell(stage: StageRun, inputs: Sequence[int], outputs: Sequence[int], recipe: int) -> Run:
    """Return the function of an F that will be recomputed. Inputs, outputs and `recipe` are registers."""
    effects, types = stage.effects, stage.device_types
    is_stateless = effects.is_stateless and not effects.runs_python

    def forward(frame: Frame) -> None:
        registers = frame.registers
        values = [registers[index] for index in inputs]
        if is_stateless:
            registers[recipe] = _recipe(values, effects, stage.device, types, None)
            with first_of_two_runs, user_hooks_shielded():
                results = stage.forward(frame, values)
        else:
            results, registers[recipe] = _noted_forward(stage, frame, values)
        for index, value in zip(outputs, results, strict=True):
            is_tensor = isinstance(value, torch.Tensor)
            registers[index] = value.detach().requires_grad_(value.requires_grad) if is_tensor else value

    return forward


def _noted_forward(stage: StageRun, frame: Frame, values: list[Any]) -> tuple[Sequence[Any], Recipe]:
    """Run a forward; return its outputs and its recipe, with what it changed and the tensors whose gradients it asked for."""
    effects, device = stage.effects, stage.device
    with stage.noted() as change, RANDOM_LOCK if effects.may_draw_on(device) else _UNCHANGED:
        kept = _recipe(values, effects, device, stage.device_types, change)
        asks = kept_gradients_noted(asks=effects.keeps_gradients)
        with first_of_two_runs, user_hooks_shielded(), asks as asked:
            results = stage.forward(frame, values)
    if asked:
        kept.kept = references(asked)
    for place in unwritten(kept.inputs, values, effects.loss_inputs) if effects.loss_inputs else ():
        del kept.inputs[place]
    return results, kept


def kept_apart(run: Run, stage: StageRun, *, saves: bool, recomputes: bool) -> Run:
    """Return an F without recomputation whose state is kept apart from that of others: its graph saves copies of what later forwards
    write, if a backward follows (`saves`), and in a program that `recomputes`, what it draws and changes is noted.
    """
    effects = stage.effects
    if saves and (effects.reread_buffers or effects.loss_writes):
        run = copying_forward(run, effects.reread_buffers, effects.loss_writes)
    is_locked = recomputes and effects.may_draw_on(stage.device)
    if not (is_locked or (stage.log is not None and effects.is_stateful)):
        return run

    def forward(frame: Frame) -> None:
        with stage.noted(), RANDOM_LOCK if is_locked else _UNCHANGED:
            run(frame)

    return forward


def recompute_cell(stage: StageRun, inputs: Sequence[int], recipe: int, saved: int) -> Run:
    """Return the function of an R, which writes to the register `saved` what an F without recomputation would have written."""
    device_types = stage.device_types

    def recompute(frame: Frame) -> None:
        registers = frame.registers
        before: Recipe = registers[recipe]
        values = [registers[index] for index in inputs]
        if before is _NOTHING and torch.is_grad_enabled() and not is_any_autocast_enabled():
            with recomputation:
                registers[saved] = stage.recorded(frame, values)
            return
        for place, value in before.inputs.items():
            values[place] = value
        recording = _UNCHANGED if torch.is_grad_enabled() else torch.enable_grad()
        asks = kept_gradients_noted(asks=stage.effects.keeps_gradients)
        muted = output_muted() if stage.effects.holders else _UNCHANGED
        with recomputation, recording, muted, _restored(before, stage, device_types), asks as again:
            graph = registers[saved] = stage.recorded(frame, values)
        graph.has_hooks |= pass_on(before.kept, again)

    return recompute


def _restored(before: Recipe, stage: StageRun, device_types: Sequence[str]) -> AbstractContextManager[None]:
    """Return a context in which the state of the forward holds."""
    now, autocast = _autocast(device_types), before.autocast
    if autocast == now:
        autocast = ()
    elif not autocast:
        autocast = tuple((kind, dtype, False) for kind, dtype, _ in now)
    changes = autocast or before.random is not None or stage.effects.written_buffers or before.numbers or before.left
    is_changed = bool(changes or before.flags) or before.change is not None
    return _state_restored(before, autocast, stage) if is_changed else _UNCHANGED


_UNCHANGED = nullcontext()
"""The context that changes nothing."""


@contextmanager
def _state_restored(before: Recipe, autocast: Autocast, stage: StageRun) -> Iterator[None]:
    with ExitStack() as stack:
        written = stack.enter_context(stage.undone(before.change))
        for kind, dtype, enabled in autocast:
            stack.enter_context(torch.autocast(kind, dtype, enabled))
        stack.enter_context(_tensors_restored(before, stage.effects, stage.device))
        if before.numbers:
            stack.enter_context(stage.effects.lifted.restored(before.numbers))
        stack.enter_context(restored_places(stage.effects.places, before.left))
        stack.enter_context(flags_restored(stage.effects.flagged, before.flags))
        state = [tensor for tensor in (*written, *stage.effects.written_buffers) if not tensor.is_inference()]
        stack.enter_context(preserve_versions(tuple(state)))
        stack.enter_context(state_copied(state))
        yield


@contextmanager
def _tensors_restored(before: Recipe, effects: SideEffects, device: torch.device) -> Iterator[None]:
    """Set random state and buffers to those of the forward, and at the end back to the present ones, in their own memory."""
    with RANDOM_LOCK if before.random is not None else _UNCHANGED:
        buffers = [buffer.detach().clone() for buffer in effects.written_buffers]
        memory = [(buffer, buffer.detach()) for buffer in effects.written_buffers if buffer.layout is torch.strided]
        random = None if before.random is None else _random_state(device, before.random[1].sources)
        try:
            write_buffers(effects.written_buffers, before.buffers)
            _set_random_state(before.random)
            yield
        finally:
            put_memory_back(moved_memory(memory))
            write_buffers(effects.written_buffers, buffers)
            _set_random_state(random)


def _recipe(
    values: Sequence[Any],
    effects: SideEffects,
    device: torch.device,
    device_types: Sequence[str],
    change: Change | None,
) -> Recipe:
    autocast = _autocast(device_types)
    if effects.is_stateless and not autocast:
        return _NOTHING
    return Recipe(
        _random_state(device, _sources(effects, values)) if effects.may_draw_on(device) else None,
        autocast,
        [buffer.detach().clone() for buffer in effects.written_buffers],
        {place: copied(values[place]) for place in {*effects.written_inputs, *effects.loss_inputs}},
        effects.lifted.numbers,
        [place.before() for place in effects.places],
        [tensor.requires_grad for tensor in effects.flagged],
        change,
    )


_NOTHING = Recipe(None, (), [], {}, {}, [], [])
"""The recipe of a forward that neither reads nor writes state, without autocast."""


def _sources(effects: SideEffects, values: Sequence[Any]) -> list[RandomSource]:
    """Return the sources that a forward on these values may draw from beside the generator of its device."""
    own = (*effects.generators, *(effects.loss.sources if effects.loss else ()))
    return [*own, *generator_sources(generators_among(values))]


def _random_state(device: torch.device, sources: Iterable[RandomSource]) -> _Random:
    return {one: random_state(one) for one in {_CPU, device}}, RandomStates(sources)


_CPU = torch.device("cpu")


def _set_random_state(random: _Random | None) -> None:
    if random is not None:
        states, generators = random
        for device, state in states.items():
            set_random_state(state, device)
        generators.restore()


def _autocast(device_types: Sequence[str]) -> Autocast:
    if not is_any_autocast_enabled():
        return ()
    return tuple((kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)) for kind in device_types)
