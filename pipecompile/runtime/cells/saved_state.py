"""Copies of the model's state in the autograd graph of a forward, since later forwards change the state before the backward.

    F0  buffer: 0 to 1, x * buffer saves it     F1  buffer: 1 to 2     B0  reads the copy that F0 took at its end, 1

The copies are taken at the end of the forward, as a backward right behind it would find the state. The kernel of batch norm in
evaluation mode reads running statistics in its backward, and a later call in training mode updates these without a new version.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, cast

import torch
from torch.autograd.graph import saved_tensors_hooks

from pipecompile.torch_private.autograd_engine import saved_tensor_hooks
from pipecompile.torch_private.storages import preserve_versions, storage_key, version_of
from pipecompile.tracing.state.tensor_contents import moved_memory

__all__ = ["flags_restored", "state_copied", "user_hooks_shielded", "write_buffers"]


class _Saved:
    """A tensor that autograd has saved, and its version then."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.version = tensor, version_of(tensor)

    def value(self) -> torch.Tensor:
        """Return the tensor. Raise RuntimeError in the words of autograd, which compares no versions where there are hooks."""
        if version_of(self.tensor) != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation:"
                f" [{self.tensor.type()} {list(self.tensor.shape)}] is at version {version_of(self.tensor)};"
                f" expected version {self.version} instead"
            )
        return self.tensor

    def copy(self) -> None:
        """Replace the tensor by a copy, unless the forward has written it since: the backward raises then."""
        if version_of(self.tensor) == self.version:
            self.tensor = self.tensor.detach().clone()
            self.version = version_of(self.tensor)


@contextmanager
def state_copied(state: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Let autograd save copies of these tensors and their views in this context, and any other tensor as usual. The memory that
    `weight.data = other` gives one of them in this context is its memory, too.

    Yield the list of the tensors: those that are not in it when the context ends are not copied. User hooks get copies of the tensors
    that they would get without the context.
    """
    strided = [tensor for tensor in state if tensor.layout is torch.strided]
    if not strided:
        yield strided
        return
    outer = cast("tuple[Any, Any] | None", saved_tensor_hooks())
    aliases, found = [(one, one.detach()) for one in strided], list[_Saved]()
    keys = {id(one): storage_key(one) for one in strided}

    def packed(tensor: torch.Tensor) -> Any:
        if outer is not None:
            return outer[0](tensor.detach().clone() if _keys([tensor]) & {*keys.values(), *_keys(strided)} else tensor)
        found.append(_Saved(tensor))
        return found[-1]

    with saved_tensors_hooks(packed, _Saved.value if outer is None else outer[1]):
        yield strided
    written = {keys[id(one)] for one in strided} | {storage_key(one) for one, _ in moved_memory(aliases)}
    with torch.no_grad():
        for saved in found:
            if saved.tensor.layout is torch.strided and storage_key(saved.tensor) in written:
                saved.copy()


def _keys(tensors: Iterable[torch.Tensor]) -> frozenset[int]:
    return frozenset(storage_key(tensor) for tensor in tensors if tensor.layout is torch.strided)


@contextmanager
def flags_restored(tensors: Sequence[torch.Tensor], flags: Sequence[bool]) -> Iterator[None]:
    """Set `requires_grad` of these tensors in this context, and at its end to what it was before."""
    before = [tensor.requires_grad for tensor in tensors]
    _set_flags(tensors, flags)
    try:
        yield
    finally:
        _set_flags(tensors, before)


def _set_flags(tensors: Sequence[torch.Tensor], flags: Sequence[bool]) -> None:
    for tensor, flag in zip(tensors, flags, strict=True):
        if tensor.requires_grad != flag:
            tensor.requires_grad_(flag)


def write_buffers(buffers: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    """Write through `.data`, which leaves version counters alone: autograd may have saved the buffers. The first forward may have
    given them other sizes, as observers of quantization do.
    """
    for buffer, value in zip(buffers, values, strict=True):
        if buffer.shape != value.shape:
            with torch.no_grad(), preserve_versions((buffer,)):
                buffer.resize_(value.shape)
        buffer.data.copy_(value)


def user_hooks_shielded() -> AbstractContextManager[object]:
    """Return a context that shields the user's `saved_tensors_hooks` from tensors of a graph that is dropped."""
    if saved_tensor_hooks() is None:
        return _UNCHANGED
    return saved_tensors_hooks(torch.Tensor.detach, lambda saved: saved)


_UNCHANGED = nullcontext()
"""The context that changes nothing."""
