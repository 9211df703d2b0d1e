"""Copies of the model's state in the autograd graph of a recomputation, since the state changes once the recomputation ends.

F0  buffer: 0 to 1     F1  buffer: 1 to 2     R0  buffer is 0 again; 0 to 1; x * buffer saves 1; at the end buffer is 2
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
from torch.autograd.graph import saved_tensors_hooks

from pipecompile.torch_private.autograd_engine import saved_tensor_hooks
from pipecompile.torch_private.storages import storage_key, version_of

__all__ = ["state_copied"]


def state_copied(state: Iterable[torch.Tensor]) -> AbstractContextManager[object]:
    """Return a context in which autograd saves copies of these tensors and their views, and any other tensor as usual.

    Hooks of the user's get what they would get without the context.
    """
    keys = frozenset(storage_key(tensor) for tensor in state if tensor.layout is torch.strided)
    if not keys:
        return nullcontext()
    outer = cast("tuple[Any, Any] | None", saved_tensor_hooks())
    pack, unpack = outer or (_with_version, _of_version)

    def packed(tensor: torch.Tensor) -> Any:
        is_state = tensor.layout is torch.strided and storage_key(tensor) in keys
        return pack(tensor.detach().clone() if is_state else tensor)

    return saved_tensors_hooks(packed, unpack)


def _with_version(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
    return tensor, version_of(tensor)


def _of_version(saved: tuple[torch.Tensor, int]) -> torch.Tensor:
    """Return a saved tensor. Raise RuntimeError in the words of autograd, which compares no versions where there are hooks."""
    tensor, version = saved
    if version_of(tensor) != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation:"
            f" [{tensor.type()} {list(tensor.shape)}] is at version {version_of(tensor)}; expected version {version} instead"
        )
    return tensor
