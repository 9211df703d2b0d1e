"""Memory of tensors, sparse ones included."""

from __future__ import annotations

import torch

__all__ = ["footprint"]


def footprint(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor's elements; of a sparse tensor, the bytes of its stored values and indices."""
    if tensor.layout is torch.strided:
        return tensor.nbytes
    if tensor.layout is torch.sparse_coo:
        return tensor._nnz() * tensor.element_size() + tensor._indices().nbytes
    parts = ("values", "crow_indices", "col_indices", "ccol_indices", "row_indices")
    compressed = (torch.sparse_csr, torch.sparse_bsr), (torch.sparse_csc, torch.sparse_bsc)
    names = parts[:3] if tensor.layout in compressed[0] else (parts[0], *parts[3:])
    return sum(getattr(tensor, name)().nbytes for name in names) if tensor.layout in sum(compressed, ()) else 0
