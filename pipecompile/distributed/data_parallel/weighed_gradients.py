"""Gradients of a replica, weighted by its part of the batch."""

from __future__ import annotations

import torch

__all__ = ["weigh_in_place", "weighed"]


def weigh_in_place(gradients: torch.Tensor, share: float) -> None:
    """Multiply gradients by the share of a replica. Those of a loss that counts nothing are not numbers, and become 0."""
    gradients.mul_(share) if share else gradients.zero_()


def weighed(gradient: torch.Tensor | None, share: float) -> torch.Tensor | None:
    """Return a copy of a gradient, multiplied by the share of a replica."""
    if gradient is not None:
        weigh_in_place(gradient := gradient.clone(), share)
    return gradient
