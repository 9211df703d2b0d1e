"""Gradients of the inputs: joined from the micro-batches and handed back to whoever made the inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce

import torch

from pipecompile.runtime.frame import Frame
from pipecompile.tracing.inputs.flat import FlatInputs

__all__ = ["input_gradient", "return_input_gradients"]


def input_gradient(frame: Frame, name: str, leaf: torch.Tensor, dim: int | None) -> torch.Tensor | None:
    """The gradient of one input: micro-batches' gradients joined, or summed when they share the input."""
    parts = [_sum(found, leaf.device) for found in frame.departures.get((name, True), [])]
    if all(part is None for part in parts):
        return None
    if dim is None:
        return torch.stack([part for part in parts if part is not None]).sum(0)
    slices = torch.tensor_split(leaf.detach(), len(parts), dim)
    joined = [torch.zeros_like(s) if p is None else p for p, s in zip(parts, slices, strict=True)]
    return torch.cat(joined, dim)


def _sum(found: Mapping[int, torch.Tensor | None], device: torch.device) -> torch.Tensor | None:
    """The last stage's first, as autograd adds them up."""
    gradients = [found[stage] for stage in sorted(found, reverse=True)]
    there = [gradient.to(device) for gradient in gradients if gradient is not None]
    return reduce(torch.add, there) if there else None


def return_input_gradients(names: Sequence[str], inputs: FlatInputs, frame: Frame) -> None:
    """After a step: backward from the inputs that want a gradient into whatever made them."""
    found = [
        (leaf, input_gradient(frame, name, leaf, dim))
        for name, leaf, dim in zip(names, inputs.leaves, inputs.dims, strict=True)
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad
    ]
    pairs = [(leaf, gradient) for leaf, gradient in found if gradient is not None]
    if pairs:
        torch.autograd.backward([leaf for leaf, _ in pairs], [gradient for _, gradient in pairs])
