"""Gradients of the inputs: joined from the micro-batches and handed back to whoever made the inputs."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pipecompile.runtime.frame import Frame
from pipecompile.tracing.inputs import FlatInputs

__all__ = ["input_gradient", "return_input_gradients"]


def input_gradient(frame: Frame, name: str, leaf: torch.Tensor, dim: int | None) -> torch.Tensor | None:
    """The gradient of one input: micro-batches' gradients joined, or summed when they share the input."""
    parts = frame.departures.get((name, True), [])
    if all(part is None for part in parts):
        return None
    if dim is None:
        return torch.stack([part.to(leaf.device) for part in parts if part is not None]).sum(0)
    slices = torch.tensor_split(leaf.detach(), len(parts), dim)
    joined = [torch.zeros_like(s) if p is None else p.to(leaf.device) for p, s in zip(parts, slices, strict=True)]
    return torch.cat(joined, dim)


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
