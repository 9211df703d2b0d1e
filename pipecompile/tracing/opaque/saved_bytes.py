"""The bytes that autograd saves for the backward of a call."""

from __future__ import annotations

import torch

from pipecompile.torch_private.storages import storage_key

__all__ = ["SavedBytes", "memory_key"]


def memory_key(tensor: torch.Tensor) -> int:
    """Return an identity of the tensor's memory, equal for all views of it."""
    return storage_key(tensor) if tensor.layout is torch.strided else id(tensor)


class SavedBytes:
    """Bytes that autograd saves, by the memory that has them. `state` are the keys of the model's tensors, which are there anyway.

    The graph of the call keeps this object alive, so the object leads to no result of the call: no collector sees that cycle.
    """

    def __init__(self, state: frozenset[int]) -> None:
        self.state = state
        self.sizes: dict[int, int] = {}

    def note(self, tensor: torch.Tensor) -> torch.Tensor:
        """Note the bytes of a tensor that autograd saves."""
        key = memory_key(tensor)
        if key not in self.state:
            self.sizes[key] = tensor.untyped_storage().nbytes() if tensor.layout is torch.strided else 0
        return tensor.detach()
