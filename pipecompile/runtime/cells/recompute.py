"""Checkpointing: a forward that keeps nothing but how to run it again, and the recomputation that gives what it would have kept.

    F   inputs ─► stage ─► outputs             random state, surroundings and what the stage will overwrite: the recipe
    R   inputs, recipe ─► stage ─► @s          the same numbers from the same calls; outputs are dropped

F records a graph like any forward, so that the same kernels run and the outputs say truly whether they want a gradient, and
drops it when it is over: R holds as much later, so that makes no peak. R begins with the buffers that F found and leaves those
that it found itself: running statistics are updated once. While R runs, `is_recomputing()` holds, and what the model notes on
itself is not noted again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from threading import RLock
from typing import Any

import torch
from torch import fx
from torch.autograd.graph import saved_tensors_hooks

from pipecompile.graph.stages import Stage
from pipecompile.runtime.cells.forward_backward import Run, Saved, attached
from pipecompile.runtime.registers import Frame
from pipecompile.torch_private.autograd_engine import saved_tensor_hooks
from pipecompile.torch_private.modes import enter_autocast
from pipecompile.tracing.node_facts import facts
from pipecompile.tracing.recompute_flag import recomputation

__all__ = ["Footprints", "Stint", "checkpointed_cell", "drawing_alone", "recompute_cell"]

_DRAWING = RLock()
"""The CPU has one random state for all threads: who notes it draws from it alone until done."""

Autocast = tuple[tuple[str, torch.dtype, bool], ...]


@dataclass(frozen=True, slots=True)
class Footprints:
    """What a run of a stage leaves in the world: it draws random numbers, writes buffers, and writes its inputs. `casts`: it
    has autocast regions.
    """

    draws: bool = False
    buffers: tuple[torch.Tensor, ...] = ()
    inputs: tuple[int, ...] = ()
    casts: bool = False

    @classmethod
    def of(cls, stage: Stage) -> Footprints:
        ports = [node for node in stage.module.graph.nodes if node.op == "placeholder"][: len(stage.inputs)]
        nodes = [node for node in stage.module.graph.nodes if node.op != "placeholder"]
        written = {storage for node in nodes for storage in facts(node).mutates}
        return cls(
            any(facts(node).draws for node in nodes),
            tuple({id(tensor): tensor for tensor in _lasting(stage.module, nodes, written)}.values()),
            tuple(place for place, port in enumerate(ports) if written & facts(port).storages),
            any(node.target is enter_autocast for node in nodes),
        )


def _lasting(module: fx.GraphModule, nodes: Sequence[fx.Node], written: set[int]) -> Iterator[torch.Tensor]:
    """The tensors of the model that the nodes of a stage may write."""
    for node in nodes:
        if node.op == "call_module" and facts(node).mutates:
            yield from module.get_submodule(str(node.target)).buffers()
        elif node.op == "get_attr" and written & facts(node).storages:
            *parents, name = str(node.target).split(".")
            yield getattr(module.get_submodule(".".join(parents)), name)


@dataclass(slots=True)
class Recipe:
    """How a forward was begun. `written` are the inputs that it changed, by place, as they were."""

    random: torch.Tensor | None
    autocast: Autocast
    buffers: list[torch.Tensor]
    written: dict[int, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Stint:
    """A stage on a device. `size_of` is the micro-batch whose size it takes, if it does."""

    stage: Callable[..., Sequence[Any]]
    size_of: int | None
    prints: Footprints
    device: torch.device

    def attached(self, frame: Frame, values: list[Any]) -> tuple[Sequence[Any], Saved]:
        size = () if self.size_of is None else (frame.sizes[self.size_of],)
        return attached(self.stage, values, size, casts=self.prints.casts)


def checkpointed_cell(ran: Stint, inputs: Sequence[int], outputs: Sequence[int], recipe: int) -> Run:
    """F of a cell that will be recomputed: `recipe` is the register of what R needs beside the inputs."""
    prints, kinds = ran.prints, _kinds(ran.device)

    def forward(frame: Frame) -> None:
        registers = frame.registers
        values = [registers[index] for index in inputs]
        with _DRAWING if prints.draws else nullcontext():
            registers[recipe] = _noted(values, prints, ran.device, kinds)
            with _held_plainly():
                made = ran.attached(frame, values)[0]
        for index, value in zip(outputs, made, strict=True):
            is_tensor = isinstance(value, torch.Tensor)
            registers[index] = value.detach().requires_grad_(value.requires_grad) if is_tensor else value

    return forward


def _held_plainly() -> AbstractContextManager[None]:
    """Hooks of the user on what autograd saves are for what it will use: not for a graph that is dropped."""
    hooked = saved_tensor_hooks() is not None
    return saved_tensors_hooks(torch.Tensor.detach, lambda saved: saved) if hooked else nullcontext()


def drawing_alone(run: Run) -> Run:
    """A forward that is not run again, beside others whose random state is noted."""

    def forward(frame: Frame) -> None:
        with _DRAWING:
            run(frame)

    return forward


def recompute_cell(ran: Stint, inputs: Sequence[int], recipe: int, saved: int) -> Run:
    """R: what the forward of an ordinary cell would have left in the register `saved`."""
    kinds = _kinds(ran.device)

    def recompute(frame: Frame) -> None:
        registers = frame.registers
        noted: Recipe = registers[recipe]
        values = [noted.written.get(place, registers[index]) for place, index in enumerate(inputs)]
        with recomputation(), torch.enable_grad(), _surroundings(noted, ran, kinds):
            _, registers[saved] = ran.attached(frame, values)

    return recompute


def _surroundings(noted: Recipe, ran: Stint, kinds: Sequence[str]) -> AbstractContextManager[None]:
    """Of the forward, for the length of a block; most stages find all as it was."""
    autocast = noted.autocast if noted.autocast != _autocast(kinds) else ()
    is_at_home = not autocast and noted.random is None and not ran.prints.buffers
    return nullcontext() if is_at_home else _restored(noted, autocast, ran)


@contextmanager
def _restored(noted: Recipe, autocast: Autocast, ran: Stint) -> Iterator[None]:
    with ExitStack() as stack:
        for kind, dtype, enabled in autocast:
            stack.enter_context(torch.autocast(kind, dtype, enabled))
        stack.enter_context(_as_it_was(noted, ran.prints, ran.device))
        yield


def _noted(values: Sequence[Any], prints: Footprints, device: torch.device, kinds: Sequence[str]) -> Recipe:
    return Recipe(
        _random(device) if prints.draws else None,
        _autocast(kinds),
        [buffer.detach().clone() for buffer in prints.buffers],
        {place: _copied(values[place]) for place in prints.inputs if isinstance(values[place], torch.Tensor)},
    )


def _copied(value: torch.Tensor) -> torch.Tensor:
    return value.detach().clone().requires_grad_(value.requires_grad)


@contextmanager
def _as_it_was(noted: Recipe, prints: Footprints, device: torch.device) -> Iterator[None]:
    """Random state and buffers of the forward, for the length of the block; then those of now again."""
    with _DRAWING if prints.draws else nullcontext():
        now = [buffer.detach().clone() for buffer in prints.buffers]
        random = _random(device) if prints.draws else None
        try:
            _put(prints.buffers, noted.buffers)
            _set_random(noted.random, device)
            yield
        finally:
            _put(prints.buffers, now)
            _set_random(random, device)


def _put(buffers: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    """Through `.data`: autograd may have saved them, and does not mind, as it does not where forwards follow each other."""
    for buffer, value in zip(buffers, values, strict=True):
        buffer.data.copy_(value)


def _random(device: torch.device) -> torch.Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def _set_random(state: torch.Tensor | None, device: torch.device) -> None:
    if state is not None:
        torch.cuda.set_rng_state(state, device) if device.type == "cuda" else torch.set_rng_state(state)


def _kinds(device: torch.device) -> tuple[str, ...]:
    return ("cpu",) if device.type == "cpu" else ("cpu", device.type)


def _autocast(kinds: Sequence[str]) -> Autocast:
    return tuple((kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)) for kind in kinds)
