"""The bytes that autograd saves for the backward, each storage counted once."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

__all__ = ["SavedLedger"]


class SavedLedger:
    """The sum of the storages that autograd saves while `recording()`. Storages of the tensors in `free` do not count.

    A storage is identified by a weak reference and not by its address: a value may be freed between two nodes and its
    address reused, but while the reference lives, the address of the storage's control block is not.
    """

    def __init__(self, free: Iterable[Tensor]) -> None:
        self._known = {_key(t.untyped_storage()) for t in free if t.layout is torch.strided}
        self._bytes = 0
        self._new: list[StorageWeakRef] = []
        self._makers: dict[StorageWeakRef, list[str]] = {}

    def recording(self) -> saved_tensors_hooks:
        """Return a context that counts what autograd saves."""
        return saved_tensors_hooks(self._pack, lambda packed: packed)

    def take(self) -> int:
        """Return the bytes added since the last call."""
        taken, self._bytes = self._bytes, 0
        return taken

    def note_results(self, node: str, tensors: Iterable[Tensor]) -> list[StorageWeakRef]:
        """Note that a node returned these tensors. Return the storages that the node was the first to save."""
        for tensor in tensors:
            if tensor.layout is torch.strided:
                self._makers.setdefault(_key(tensor.untyped_storage()), []).append(node)
        new, self._new = self._new, []
        return new

    def makers(self, keys: Iterable[StorageWeakRef]) -> frozenset[str]:
        """Return the nodes that returned these storages, also as views. Complete after all nodes ran."""
        return frozenset(name for key in keys for name in self._makers.get(key, ()))

    def _pack(self, tensor: Tensor) -> Tensor:
        """Count one saved tensor. Return it detached, since an output would keep its own graph alive."""
        if tensor.layout is torch.strided:
            storage = tensor.untyped_storage()
            reference = _key(storage)
            if reference not in self._known:
                self._known.add(reference)
                self._bytes += storage.nbytes()
                self._new.append(reference)
        return tensor.detach()


def _key(storage: torch.UntypedStorage) -> StorageWeakRef:
    return StorageWeakRef(storage)  # type: ignore[no-untyped-call]
