"""Memory and versions of tensors: bytes, keys of storages, version counters, and the exchange of two tensors' insides."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass  # 2.11; True for DTensor and its like

__all__ = [
    "exchange",
    "footprint",
    "foreach_add",
    "foreach_copy",
    "foreach_mul",
    "foreach_sub",
    "is_traceable_wrapper_subclass",
    "memory_state",
    "n_tensors",
    "preserve_versions",
    "storage_key",
    "strided_parts",
    "version_of",
]


version_of: Callable[[torch.Tensor], int] = attrgetter("_version")
"""Return how often a tensor was written in place, views included. 2.11; bound, because steps compare versions."""


def memory_state(tensor: torch.Tensor) -> tuple[int, int]:
    """Return numbers that change when a tensor is written in place, or given other memory by `tensor.data = other`. 2.11."""
    is_plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
    return tensor._version, tensor.data_ptr() if is_plain else 0


preserve_versions = _unsafe_preserve_version_counter
"""Context manager in which writes to the tensors leave their version counters as they are. 2.11."""

exchange: Callable[[torch.Tensor, torch.Tensor], None] = torch._C._swap_tensor_impl
"""Swap the insides of two tensor objects. 2.11; `torch.utils.swap_tensors` refuses tensors with weak references."""

foreach_add: Callable[..., Sequence[torch.Tensor]] = torch._foreach_add
"""Return the sum of each tensor of one list and its tensor of another, in few kernels. 2.11."""

foreach_mul: Callable[..., Sequence[torch.Tensor]] = torch._foreach_mul
"""Return each tensor times its number, or times its tensor of another list, in few kernels. 2.11."""

foreach_sub: Callable[..., Sequence[torch.Tensor]] = torch._foreach_sub
"""Return each tensor of one list less its tensor of another, in few kernels. 2.11."""

foreach_copy: Callable[..., Any] = torch._foreach_copy_
"""Copy each tensor of the second list into that of the first, in few kernels. 2.11."""


def n_tensors(tensor: torch.Tensor) -> int:
    """Return how many tensors share the storage of a strided tensor, itself and those inside of torch included. 2.11."""
    storage = tensor.untyped_storage()
    return int(torch._C._storage_Use_Count(storage._cdata)) - 1


def storage_key(tensor: torch.Tensor) -> int:
    """Return a key of the memory that a strided tensor lives in, of a DTensor its part; views share it. Valid while the tensor is alive.
    2.11.
    """
    part = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    key: int = part.untyped_storage()._cdata
    return key


def strided_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the strided tensors that hold the elements of a tensor: itself, or the values and indices of a sparse one. 2.11."""
    if tensor.layout is torch.strided:
        return [tensor]
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    names = ("values", "crow_indices", "col_indices", "ccol_indices", "row_indices")
    is_by_rows = tensor.layout in (torch.sparse_csr, torch.sparse_bsr)
    is_compressed = is_by_rows or tensor.layout in (torch.sparse_csc, torch.sparse_bsc)
    own = names[:3] if is_by_rows else (names[0], *names[3:])
    return [getattr(tensor, name)() for name in own] if is_compressed else []


def footprint(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor's elements; of a sparse tensor, the bytes of its stored values and indices."""
    if tensor.layout is torch.strided:
        return tensor.nbytes
    return sum(part.nbytes for part in strided_parts(tensor))
