"""Gradients of received values in the strides in which autograd computes them, as in eager.

    eager      ... ◄── g, strides (128, 8, 1) ── ...
    a leaf     leaf.grad: a copy of g with the strides of the leaf, (128, 1, 16)

A kernel may round differently, or is wrong, on other strides: BatchNorm of torch 2.14 is for a single sample (CPU).
A cell watches a value until a gradient has come in the value's own strides: what its backward makes of it does not change.
"""

from __future__ import annotations

import torch

from pipecompile.torch_private.autograd_engine import hook_uncounted, hooks_of_tensor

__all__ = ["Layout", "gradient_of", "keep_layout"]


Layout = tuple[int, torch.Size, tuple[int, ...]]
"""A value that a cell receives: its place among them, its shape and its strides."""


class LayoutHook:
    """A hook on a leaf that keeps its gradient if that is dense and has other strides. It does not hold the leaf.

    A gradient in the strides of the leaf adds `layout` to `known`.
    """

    __slots__ = ("_calls", "_known", "_layout", "gradient")

    def __init__(self, layout: Layout, known: set[Layout]) -> None:
        self._layout, self._known, self._calls = layout, known, 0
        self.gradient: torch.Tensor | None = None

    def __call__(self, gradient: torch.Tensor | None) -> None:
        self._calls += 1
        self.gradient = None
        if gradient is None or gradient.layout is not torch.strided or self._calls > 1:
            return
        if gradient.stride() == self._layout[2]:
            self._known.add(self._layout)
        elif _is_dense(gradient):
            self.gradient = gradient


def keep_layout(leaf: torch.Tensor, place: int, known: set[Layout]) -> None:
    """Let `gradient_of` return the gradient of a leaf with the strides that it will be computed in, unless these are known to be its own."""
    if leaf.layout is torch.strided and leaf.dim() > 1 and (layout := (place, leaf.shape, leaf.stride())) not in known:
        hook_uncounted(leaf, LayoutHook(layout, known))


def gradient_of(leaf: torch.Tensor) -> torch.Tensor | None:
    """Return the gradient of a leaf after a backward, once."""
    if hooks := hooks_of_tensor(leaf):
        for hook in hooks.values():
            if isinstance(hook, LayoutHook) and hook.gradient is not None:
                kept, hook.gradient = hook.gradient, None
                return kept.clone()  # it may lie in memory that the next copy from another stage writes
    return leaf.grad


def _is_dense(tensor: torch.Tensor) -> bool:
    """Return whether the elements of a tensor fill their memory without gaps or overlaps."""
    strides, sizes = tensor.stride(), tensor.shape
    order = sorted(range(tensor.dim()), key=lambda dim: (strides[dim], sizes[dim]), reverse=True)
    return tensor.permute(order).is_contiguous()
