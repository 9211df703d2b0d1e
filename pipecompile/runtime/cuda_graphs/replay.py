"""A captured stage: its forward and its backward for the micro-batches of one slot, as one operation of autograd.

    F   inputs ──copied──► ports ═ replay ═► outputs ──copied──► registers
    B   gradients ──copied──► ports ═ replay ═► gradients of inputs and weights ──► added up by autograd, hooks and all

Between the two, what the backward needs lies in the graphs' own memory.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from pipecompile.errors import InputError
from pipecompile.graph.backward_split import explore
from pipecompile.runtime.cells.forward_backward import edge_of
from pipecompile.runtime.cuda_graphs.capture import Tape
from pipecompile.torch_private import pytree
from pipecompile.torch_private.autograd_engine import hooks_of_tensor
from pipecompile.torch_private.storages import foreach_copy

__all__ = ["Captured", "Function", "said"]

Function = Callable[..., Sequence[Any]]


class Captured:
    """The graphs of one slot for inputs of one kind. `turn` counts what was replayed."""

    def __init__(
        self, run: Function, tape: Tape, leaves: Sequence[Any], spec: pytree.TreeSpec, refuse: Callable[[str], None]
    ) -> None:
        self.tape, self.refuse, self.turn = tape, refuse, 0
        own = [_own(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        self.inputs = [leaf for leaf in own if isinstance(leaf, torch.Tensor)]
        with _uncached_autocast():
            made, self.replay = tape.capture(lambda: run(*pytree.tree_unflatten(own, spec)))
        self.made, self.form = pytree.tree_flatten(made)
        self.outputs = [leaf for leaf in self.made if isinstance(leaf, torch.Tensor)]
        self.roots = [edge_of(output) if output.requires_grad else None for output in self.outputs]
        self.weights = self._other_leaves()
        self.back: Back | None = None
        weakref.finalize(self, tape.drain)

    def _other_leaves(self) -> list[torch.Tensor]:
        """What gets gradients beside the inputs."""
        nodes, _ = explore([root for root in self.roots if root is not None], frozenset())
        leaves = (getattr(node, "variable", None) for node in nodes)
        own = set(map(id, self.inputs))
        return [leaf for leaf in leaves if leaf is not None and id(leaf) not in own]

    def run(self, leaves: Sequence[Any]) -> Sequence[Any]:
        """The outputs, in memory of the caller."""
        given = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        made = iter(_Replayed.apply(self, *given, *self.weights) if any(self.roots) else self.forward(given))
        found: Sequence[Any] = pytree.tree_unflatten(
            [next(made) if isinstance(leaf, torch.Tensor) else leaf for leaf in self.made], self.form
        )
        return found

    def forward(self, given: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Replay F."""
        _put(self.inputs, given)
        self.turn += 1
        self.replay()
        return [output.detach().clone() for output in self.outputs]

    def backward(self, given: Sequence[torch.Tensor | None]) -> Sequence[torch.Tensor | None]:
        """Replay B: gradients of the inputs and of the weights. One that cannot be captured runs as it is, on the same memory."""
        which = tuple(gradient is not None for gradient in given)
        gradients = [gradient for gradient in given if gradient is not None]
        if self.back is None:
            try:
                self.back = Back.capture(self, which, gradients)
            except Exception as error:
                self.refuse(f"its backward: {said(error)}")
                return self.gradients(which, gradients)
        if self.back.which != which:
            raise InputError(
                "other outputs of a stage got gradients than when it was captured",
                why="a CUDA graph is for those alone",
                hint="compile(..., cuda_graphs=False)",
            )
        _put(self.back.ports, gradients)
        self.back.replay()
        return [*map(_handed_on, (*self.inputs, *self.weights), self.back.found)]

    def gradients(self, which: Sequence[bool], gradients: Sequence[torch.Tensor]) -> tuple[torch.Tensor | None, ...]:
        """By autograd, on what the last replay left."""
        roots = [root for root, is_given in zip(self.roots, which, strict=True) if is_given and root is not None]
        tensors = (*self.inputs, *self.weights)
        wanted = [tensor for tensor in tensors if tensor.requires_grad]
        with _unhooked(self.weights):
            found = iter(torch.autograd.grad(roots, wanted, gradients, retain_graph=True, allow_unused=True))
        return tuple(next(found) if tensor.requires_grad else None for tensor in tensors)


@dataclass(frozen=True, slots=True)
class Back:
    """A captured backward: `which` outputs have gradients, the `ports` for these, and what is `found` after a replay."""

    which: tuple[bool, ...]
    ports: list[torch.Tensor]
    replay: Callable[[], None]
    found: tuple[torch.Tensor | None, ...]

    @classmethod
    def capture(cls, captured: Captured, which: tuple[bool, ...], gradients: Sequence[torch.Tensor]) -> Back:
        """After the replay of the forward."""
        ports = [_own(gradient) for gradient in gradients]
        with _uncached_autocast():
            found, replay = captured.tape.capture(lambda: captured.gradients(which, ports))
        return cls(which, ports, replay, found)


class _Replayed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, captured: Captured, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        made = captured.forward(tensors[: len(captured.inputs)])
        ctx.captured, ctx.turn = captured, captured.turn
        ctx.set_materialize_grads(False)
        pairs = zip(made, captured.roots, strict=True)
        ctx.mark_non_differentiable(*[output for output, root in pairs if root is None])
        return tuple(made)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        assert ctx.turn == ctx.captured.turn, "a slot was used again before its backward"
        return None, *ctx.captured.backward(gradients)


@contextmanager
def _unhooked(weights: Sequence[torch.Tensor]) -> Iterator[None]:
    """Hooks of weights are called when autograd adds the gradients up, which is later."""
    hooked = [hooks for weight in weights if (hooks := hooks_of_tensor(weight))]
    before = [dict(hooks) for hooks in hooked]
    for hooks in hooked:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, was in zip(hooked, before, strict=True):
            hooks.update(was)


def _handed_on(tensor: torch.Tensor, gradient: torch.Tensor | None) -> torch.Tensor | None:
    """In memory of its own, but what is only added to a gradient that is there."""
    is_added = tensor.grad is not None and not hooks_of_tensor(tensor)
    return gradient if gradient is None or is_added else gradient.clone()


def _own(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _put(ports: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    """Through `.data`, since autograd has saved them, and is to find what is put there."""
    if ports:
        foreach_copy([port.data for port in ports], list(values))


class _uncached_autocast:  # noqa: N801 used as a context, as a function is
    """Weights that autocast casts are cast in the graph, not taken from before."""

    def __enter__(self) -> None:
        self.before = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)

    def __exit__(self, *_: object) -> None:
        torch.set_autocast_cache_enabled(self.before)


def said(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
