"""The bytes that autograd saves for the backward, each storage counted once."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

__all__ = ["SavedLedger"]


class SavedLedger:
    """Adds up the storages that autograd saves while `recording()`. Those of the tensors in `free` count nothing.

    A storage is known by a weak reference, not by its address: a value may be freed between two nodes and its address
    taken by another, but while the reference lives the address of the storage's control block is not used again.
    """

    def __init__(self, free: Iterable[Tensor]) -> None:
        self._known = {_key(t.untyped_storage()) for t in free if t.layout is torch.strided}
        self._bytes = 0

    def recording(self) -> saved_tensors_hooks:
        """A context in which what autograd saves is added up."""
        return saved_tensors_hooks(self._pack, lambda packed: packed)

    def take(self) -> int:
        """The bytes added since the last call."""
        taken, self._bytes = self._bytes, 0
        return taken

    def _pack(self, tensor: Tensor) -> Tensor:
        """Count one saved tensor; detached, because keeping an output itself would tie a knot around its graph."""
        if tensor.layout is torch.strided:
            storage = tensor.untyped_storage()
            reference = _key(storage)
            if reference not in self._known:
                self._known.add(reference)
                self._bytes += storage.nbytes()
        return tensor.detach()


def _key(storage: torch.UntypedStorage) -> StorageWeakRef:
    return StorageWeakRef(storage)  # type: ignore[no-untyped-call]
