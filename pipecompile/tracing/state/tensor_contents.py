"""Contents of a model's tensors, restored after a run of the real model. (`snapshot` restores which tensors it holds.)"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from pipecompile.torch_private import pytree
from pipecompile.torch_private.accelerators import forked_generators
from pipecompile.torch_private.modes import ObservingMode
from pipecompile.torch_private.operators import HigherOrderOperator, schema_of
from pipecompile.torch_private.storages import preserve_versions, storage_key
from pipecompile.tracing.state.snapshot import Place, tensors_of

__all__ = ["CopyBeforeWrite", "is_same_memory", "moved_memory", "put_memory_back", "tensors_restored"]


@contextmanager
def tensors_restored(
    *roots: Any, most: int | None = None, places: Sequence[Place] | None = None
) -> Iterator[list[torch.Tensor]]:
    """Restore, when the block ends, the contents and memory of all tensors that a model or other objects hold, `.grad`, and the
    random states of GPUs.

    Buffers and plain tensors are copied at once, a parameter before the first kernel that writes to it. `p.data = values` gives a
    tensor other memory, and is undone as well. With `most`, only the tensors in the `most` nearest containers are restored, and
    each is copied before the first kernel that writes to it; after the block, the list then has those that had changed. For `places`
    see `tensors_of`.
    """
    held = tensors_of(*roots, most=most, places=places)
    parameters = [tensor for tensor in held if isinstance(tensor, nn.Parameter)]
    gradients = [(parameter, parameter.grad, parameter.requires_grad) for parameter in parameters]
    parameter_ids = {id(parameter) for parameter in parameters}
    others = [tensor for tensor in held if id(tensor) not in parameter_ids and not tensor.is_inference()]
    with torch.no_grad():
        copies = [(tensor, tensor.clone()) for tensor in others] if most is None else []
    memory = [(tensor, tensor.detach()) for tensor in (*parameters, *others) if tensor.layout is torch.strided]
    guard = CopyBeforeWrite(held if most is not None else parameters)
    cards = dict.fromkeys(tensor.device for tensor in parameters)
    versions, changed = preserve_versions((*parameters, *others)), list[torch.Tensor]()
    with forked_generators(cards), versions:
        try:
            with guard:
                yield changed
        finally:
            moved = put_memory_back(memory)
            for tensor, copy in (*copies, *guard.copies.values()):
                tensor.data.copy_(copy)
            changed += [*moved, *(tensor for tensor, _ in guard.copies.values())]
            changed += [one[0] for one in gradients if _put_back(*one)]


def put_memory_back(memory: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> list[torch.Tensor]:
    """Give tensors the memory of their aliases, made before, and return those that had other memory."""
    moved = [(tensor, before) for tensor, before in memory if not is_same_memory(tensor, before)]
    for tensor, before in moved:
        tensor.data = before
    return [tensor for tensor, _ in moved]


def moved_memory(memory: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the pairs of real tensors and their aliases, made before, but for those that surely have the same memory. It calls no Python for
    each tensor, because a step asks for all buffers of BatchNorm layers.
    """
    return [
        (tensor, before)
        for tensor, before in memory
        if type(before) is not torch.Tensor or tensor.dtype is not before.dtype or not tensor.is_set_to(before)
    ]


def _put_back(parameter: nn.Parameter, gradient: torch.Tensor | None, required: bool) -> bool:
    """Give a parameter its gradient and its flag back, and return whether it had others."""
    if parameter.grad is gradient and parameter.requires_grad == required:
        return False
    parameter.requires_grad_(required)
    parameter.grad = gradient
    return True


def is_same_memory(tensor: torch.Tensor, before: torch.Tensor) -> bool:
    """Return whether a tensor still is what `before`, an alias that was made of it, is."""
    now = (storage_key(tensor), tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype)
    return now == (storage_key(before), before.shape, before.stride(), before.storage_offset(), before.dtype)


class CopyBeforeWrite(ObservingMode):  # type: ignore[no-untyped-call]
    """Copies of the tensors that kernels write; `copies` maps the storage to (tensor, copy)."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__()
        strided = [tensor for tensor in tensors if tensor.layout is torch.strided]
        self.owned = {
            storage_key(tensor): tensor for tensor in sorted(strided, key=torch.Tensor.numel)
        }  # of views the largest
        self.copies: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._tensors = strided

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Restore, when the block ends, the memory of the tensors, and the contents of those that kernels wrote."""
        memory = [(tensor, tensor.detach()) for tensor in self._tensors]
        try:
            yield
        finally:
            put_memory_back(memory)
            for tensor, copy in self.copies.values():
                tensor.data.copy_(copy)

    def observe(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not isinstance(func, HigherOrderOperator) and schema_of(func).is_mutable:
            for argument, value in zip(schema_of(func).arguments, args, strict=False):
                self._copy(argument, value)
            for argument in schema_of(func).arguments:
                self._copy(argument, kwargs.get(argument.name))
        elif "batch_norm" in getattr(
            func, "__name__", ""
        ):  # writes running statistics that its schema does not declare
            self._copy_tensors(pytree.tree_leaves((args, kwargs)))
        return func(*args, **kwargs)

    def _copy(self, argument: Any, value: Any) -> None:
        if argument.alias_info is not None and argument.alias_info.is_write:
            self._copy_tensors(pytree.tree_leaves(value))

    def _copy_tensors(self, values: Iterable[Any]) -> None:
        for tensor in values:
            key = storage_key(tensor) if isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided else 0
            if key in self.owned and key not in self.copies:
                self.copies[key] = self.owned[key], self.owned[key].detach().clone()
