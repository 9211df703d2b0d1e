"""Gradients of weights that are added inside the CUDA graph of a backward, in memory that all micro-batches of a stage share.

    first micro-batch    replay "write"    sum  = gradient         weight.grad = sum
    later ones           replay "add"      sum += gradient         no launch of their own

The order of the additions is that of the plain loop. A `.grad` that is other memory, such as one that the user made, is added to
outside of the graph; so is that of a weight with hooks, by autograd. A sum that something else holds, such as a gradient that the
user kept, keeps its values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from pipecompile.torch_private.autograd_engine import gradient_hook_tables, other_users

__all__ = ["WeightGradients", "is_held", "is_sum"]


class WeightGradients:
    """The sums of one stage, made at the first request; each belongs to a weight that no other stage uses."""

    def __init__(self) -> None:
        self._sums: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def sum_of(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the static sum of a weight, strided as the weight is. To be called before a capture, which would own its memory."""
        if id(weight) not in self._sums:
            self._sums[id(weight)] = weight, torch.zeros_like(weight, requires_grad=False)
        return self._sums[id(weight)][1]

    def replay(
        self, weights: Sequence[torch.Tensor], replay_of: Callable[[bool], Callable[[], None]]
    ) -> list[torch.Tensor | None]:
        """Replay a backward and add the gradients of these weights. Return those that autograd is to add, for weights with hooks.

        `replay_of(adds)` returns the replay that adds to the sums, or that overwrites them.
        """
        if not weights:
            replay_of(False)()
            return []
        sums = [self.sum_of(weight) for weight in weights]
        has_hooks = any(gradient_hook_tables(weight) for weight in weights)
        if not has_hooks and all(is_sum(weight, total) for weight, total in zip(weights, sums, strict=True)):
            replay_of(True)()
            return [None] * len(weights)
        kept = [
            total.clone() if is_sum(weight, total) or is_held(total) else None
            for weight, total in zip(weights, sums, strict=True)
        ]
        replay_of(False)()
        return [_added(*each) for each in zip(weights, sums, kept, strict=True)]


def _added(weight: torch.Tensor, total: torch.Tensor, kept: torch.Tensor | None) -> torch.Tensor | None:
    """Add the gradient that a replay wrote into `total` to `.grad`, and put back what was there if something still reads it."""
    if kept is None and weight.grad is None and not gradient_hook_tables(weight):
        weight.grad = total.detach()  # the sum itself is in no other hands
        return None
    gradient = total
    if kept is not None:
        gradient = total.clone()
        total.copy_(kept)
    if gradient_hook_tables(weight) or weight.grad is None:
        return gradient if kept is not None else gradient.clone()
    weight.grad.add_(gradient)
    return None


def is_sum(weight: torch.Tensor, total: torch.Tensor) -> bool:
    """Return whether `.grad` of a weight is its sum."""
    gradient = weight.grad
    is_plain = gradient is not None and gradient.layout is torch.strided
    return bool(is_plain and gradient.data_ptr() == total.data_ptr() and gradient.stride() == total.stride())  # type: ignore[union-attr]


def is_held(total: Any) -> bool:
    """Return whether another tensor lives in the memory of a sum."""
    return other_users(total) > 0
