"""Detect inputs that look like offsets of packed sequences (`cu_seqlens`): cut like samples, they would lose their meaning.

tokens `(9, C)`, offsets 0 4 6 9     three sequences in one tensor; a slice of the offsets does not belong to a slice of the tokens
"""

from __future__ import annotations

from itertools import chain

import torch

from pipecompile.batching.call_inputs import FlatInputs

__all__ = ["offset_names"]


def offset_names(inputs: FlatInputs) -> list[str]:
    """Return the names of the leaves that are cut along dimension 0 and look like offsets into another leaf."""
    named = [*zip(inputs.names, inputs.leaves, inputs.dims, strict=True)]
    tensors = [leaf for leaf in inputs.leaves if isinstance(leaf, torch.Tensor)]
    return [
        name
        for name, leaf, dim in named
        if dim == 0
        and _is_row_of_integers(leaf)
        and _is_offsets(leaf, set(chain(*(tensor.shape for tensor in tensors if tensor is not leaf))))
    ]


def _is_row_of_integers(leaf: torch.Tensor) -> bool:
    is_whole = not (leaf.is_floating_point() or leaf.is_complex() or leaf.dtype is torch.bool)
    return leaf.dim() == 1 and len(leaf) > 1 and is_whole and not leaf.is_meta


def _is_offsets(row: torch.Tensor, lengths: set[int]) -> bool:
    """Return whether a row begins with 0, never falls, and ends at the length of a dimension of another leaf."""
    values = row.tolist()
    return values[0] == 0 and values[-1] in lengths and values == sorted(values) and values[-1] > 0
