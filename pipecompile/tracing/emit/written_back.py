"""Buffers that a graph writes in place, because the forward replaces them by tensors of the same shape and dtype."""

from __future__ import annotations

from typing import Any

import torch

from pipecompile.tracing.fakes.batch_symbol import is_same_size

__all__ = ["is_written_back"]


def is_written_back(before: Any, value: Any) -> bool:
    """Return whether a graph writes the new value of a buffer into the tensor that the model owns: at every batch size, the two have the
    same shape.
    """
    if not (isinstance(before, torch.Tensor) and isinstance(value, torch.Tensor)):
        return before is value
    if (before.dim(), before.dtype) != (value.dim(), value.dtype):
        return False
    return all(map(is_same_size, before.shape, value.shape))
