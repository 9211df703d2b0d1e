"""Gradients of the inputs: joined from the micro-batches and handed back to whoever made the inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Any

import torch

from pipecompile.batching.microbatches import MiniBatch
from pipecompile.runtime.registers import Frame

__all__ = ["input_gradients", "return_input_gradients"]


def input_gradients(frame: Frame, names: Sequence[str], batch: MiniBatch) -> list[torch.Tensor | None]:
    """The gradient of every leaf of the inputs. `names` are those of the leaves of a micro-batch."""
    leaves, origins = batch.whole.leaves, batch.origins
    gradients: list[torch.Tensor | None] = [None] * len(leaves)
    for place, (name, dim) in enumerate(zip(names, batch.dims, strict=True)):
        leaf = leaves[origins[0][place]]
        if not isinstance(leaf, torch.Tensor) or (name, True) not in frame.departures:
            continue
        parts = [_sum(found, leaf.device) for found in frame.departures[name, True]]
        if dim is list:
            for origin, part in zip(origins, parts, strict=True):
                gradients[origin[place]] = part
        elif leaf.requires_grad:
            gradients[origins[0][place]] = _whole(parts, leaf, dim)
    return gradients


def _whole(parts: Sequence[torch.Tensor | None], leaf: torch.Tensor, dim: Any) -> torch.Tensor | None:
    """Micro-batches' gradients joined, or summed when they share the input."""
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


def return_input_gradients(names: Sequence[str], batch: MiniBatch, frame: Frame) -> None:
    """After a step: backward from the inputs that want a gradient into whatever made them."""
    leaves = batch.whole.leaves
    if not any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in leaves):
        return
    found = zip(leaves, input_gradients(frame, names, batch), strict=True)
    pairs = [(leaf, gradient) for leaf, gradient in found if gradient is not None and leaf.requires_grad]
    if pairs:
        torch.autograd.backward([leaf for leaf, _ in pairs], [gradient for _, gradient in pairs])
