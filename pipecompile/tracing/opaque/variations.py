"""The inputs of a trial run: copies of the user's, for another number of samples, and with other data that are as likely."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["variation"]


def variation(leaf: Any, dim: Any, size: int | None, *, changed: bool) -> Any:
    """A copy of an input with `size` samples along `dim`, the last repeated when there are too few.

    When `changed`, the samples are in reverse order, numbers are up to a tenth smaller, and whole numbers, which may be
    indices, change places within a sample.
    """
    if not isinstance(leaf, torch.Tensor):
        return leaf
    copy = leaf.detach().clone()
    if isinstance(dim, int) and size is not None:
        order = torch.arange(size, device=leaf.device).clamp(max=leaf.shape[dim] - 1)
        copy = leaf.detach().index_select(dim, order.flip(0) if changed else order)
    if changed and copy.is_floating_point():
        generator = torch.Generator().manual_seed(size or 0)
        copy *= (0.9 + 0.1 * torch.rand(copy.shape, generator=generator)).to(copy)
    elif changed and copy.dim() > 1 and dim != copy.dim() - 1:
        copy = copy.roll(1, -1)
    return copy.requires_grad_(leaf.requires_grad)
