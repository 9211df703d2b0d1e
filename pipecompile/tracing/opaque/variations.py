"""The inputs of a trial run: copies of the user's, for another number of samples, and with other data."""

from __future__ import annotations

from enum import Enum
from typing import Any

import torch

__all__ = ["Change", "variation"]


class Change(Enum):
    """What becomes of the data. LIKELY: the samples in reverse order, numbers up to a tenth smaller, and whole numbers, which
    may be indices, change places within a sample. WILD: numbers of either sign and up to
    eight times as large, truth by lot, whole numbers as in LIKELY; many
    a model refuses that, but what it does tell shows which sizes agreed with the batch size only by chance.
    """

    NONE = 0
    LIKELY = 1
    WILD = 2


def variation(leaf: Any, dim: Any, size: int | None, *, changed: Change) -> Any:
    """A copy of an input with `size` samples along `dim`, the last repeated when there are too few."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    copy = leaf.detach().clone()
    if isinstance(dim, int) and size is not None:
        order = torch.arange(size, device=leaf.device).clamp(max=leaf.shape[dim] - 1)
        copy = leaf.detach().index_select(dim, order.flip(0) if changed is not Change.NONE else order)
    if changed is not Change.NONE:
        copy = _changed(copy, dim, torch.Generator().manual_seed(size or 0), wild=changed is Change.WILD)
    return copy.requires_grad_(leaf.requires_grad)


def _changed(copy: torch.Tensor, dim: Any, generator: torch.Generator, *, wild: bool) -> torch.Tensor:
    if copy.is_floating_point():
        factor = torch.rand(copy.shape, generator=generator)
        return copy * (16 * factor - 8 if wild else 0.9 + 0.1 * factor).to(copy)
    if wild and copy.dtype == torch.bool:
        return (torch.rand(copy.shape, generator=generator) < 0.5).to(copy.device)
    return copy.roll(1, -1) if copy.dim() > 1 and dim != copy.dim() - 1 else copy
