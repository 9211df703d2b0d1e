"""Gradients of received values in the strides in which autograd computes them, as in eager.

    eager      ... ◄── g, strides (128, 8, 1) ── ...
    a leaf     leaf.grad: a copy of g with the strides of the leaf, (128, 1, 16)

A kernel may round differently, or is wrong, on other strides: BatchNorm of torch 2.14 is for a single sample (CPU).
"""

from __future__ import annotations

import torch

from pipecompile.torch_private.autograd_engine import hook_uncounted, hooks_of_tensor

__all__ = ["gradient_of", "keep_layout"]


class LayoutHook:
    """A hook on a leaf that keeps its gradient if that is dense and has other strides. It does not hold the leaf."""

    __slots__ = ("_calls", "_strides", "gradient")

    def __init__(self, strides: tuple[int, ...]) -> None:
        self._strides, self._calls = strides, 0
        self.gradient: torch.Tensor | None = None

    def __call__(self, gradient: torch.Tensor | None) -> None:
        self._calls += 1
        self.gradient = gradient if self._calls == 1 and gradient is not None and self._is_other(gradient) else None

    def _is_other(self, gradient: torch.Tensor) -> bool:
        return gradient.layout is torch.strided and gradient.stride() != self._strides and _is_dense(gradient)


def keep_layout(leaf: torch.Tensor) -> None:
    """Let `gradient_of` return the gradient of a leaf with the strides that it will be computed in."""
    if leaf.layout is torch.strided and leaf.dim() > 1:
        hook_uncounted(leaf, LayoutHook(leaf.stride()))


def gradient_of(leaf: torch.Tensor) -> torch.Tensor | None:
    """Return the gradient of a leaf after a backward, once."""
    for hook in (hooks_of_tensor(leaf) or {}).values():
        if isinstance(hook, LayoutHook) and hook.gradient is not None:
            kept, hook.gradient = hook.gradient, None
            return kept.clone()  # it may lie in memory that the next copy from another stage writes
    return leaf.grad


def _is_dense(tensor: torch.Tensor) -> bool:
    """Return whether the elements of a tensor fill their memory without gaps or overlaps."""
    strides, sizes = tensor.stride(), tensor.shape
    order = sorted(range(tensor.dim()), key=lambda dim: (strides[dim], sizes[dim]), reverse=True)
    return tensor.permute(order).is_contiguous()
