"""Layouts of inputs: the order and density of a tensor's dimensions in memory, whatever the size of the batch.

Python code of a model may call `x.is_contiguous()` or `x.stride()`. Apart from sizes, the results depend only on the layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

__all__ = ["Layout", "copy_of", "layout_of", "strides_of"]

Layout = tuple[tuple[int, int], ...]
"""Per dimension, the innermost first: (dimension, factor). The stride is `factor` times the size of what lies inside, in elements."""

_GAP = 2
"""The factor of a dimension whose stride is larger than what lies inside, as in `x[::2]` or `x[:, :3]`."""


def layout_of(value: Any) -> Layout | None:
    """Return the layout of a tensor; None if it is contiguous, no tensor, or has no strides."""
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided or value.is_contiguous():
        return None
    strides, sizes = value.stride(), value.shape
    inner, layout = 1, []
    for dim in sorted(range(value.dim()), key=lambda dim: (strides[dim], -dim)):
        factor = 0 if strides[dim] == 0 else 1 if strides[dim] == inner else _GAP
        layout.append((dim, factor))
        inner = strides[dim] * sizes[dim] if factor else inner
    return tuple(layout)


def strides_of(layout: Layout, shape: Sequence[Any]) -> list[Any]:
    """Return the strides, in elements, of a tensor of this shape and layout. Sizes may be symbols."""
    strides: list[Any] = [0] * len(shape)
    inner: Any = 1
    for dim, factor in layout:
        strides[dim] = factor * inner
        inner = strides[dim] * shape[dim] if factor else inner
    return strides


def copy_of(value: torch.Tensor) -> torch.Tensor:
    """Return a detached copy in the same layout; `clone` makes what has gaps or is expanded contiguous."""
    value, layout = value.detach(), layout_of(value)
    if layout is None or all(factor == 1 for _, factor in layout):
        return value.clone()
    expanded = {dim for dim, factor in layout if not factor}
    part = value[tuple(slice(1) if dim in expanded else slice(None) for dim in range(value.dim()))]
    copy = torch.empty_strided(part.shape, strides_of(layout, part.shape), dtype=value.dtype, device=value.device)
    return copy.copy_(part).expand(value.shape)
