"""The gradients of all ranks as one vector: its norm, and whether all its elements are finite."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby

import torch
from torch import nn
from torch.amp import GradScaler
from torch.distributed.tensor import DTensor

from pipecompile.distributed.collectives import CollectiveGroup
from pipecompile.torch_private.dtensors import local, part_of
from pipecompile.torch_private.grad_scalers import note_infinity

__all__ = ["scale_to_norm", "spread_infinities", "total_norm"]


def total_norm(gradients: Sequence[torch.Tensor], norm_type: float, pipeline: CollectiveGroup) -> torch.Tensor:
    """Return the norm of the gradients of all ranks of a pipeline. A DTensor is counted once, not once per rank."""
    total = torch.zeros((), dtype=torch.float64, device="cpu")
    if norm_type == torch.inf:
        gradients = [_with_elements(gradient) for gradient in gradients]
    for _, same_placement in groupby(sorted(gradients, key=_placement), key=_placement):
        norm = torch.nn.utils.get_total_norm([*same_placement], norm_type)
        norm = (norm.full_tensor() if isinstance(norm, DTensor) else norm).to(total)
        total = torch.maximum(total, norm) if norm_type == torch.inf else total + norm**norm_type
    return pipeline.max(total) if norm_type == torch.inf else pipeline.sum(total) ** (1 / norm_type)


def _with_elements(gradient: torch.Tensor) -> torch.Tensor:
    """Return a gradient of the same largest element that has one on this rank at least: torch takes no infinity norm of an empty part.

    All ranks that share a DTensor take its norm together, so that none can leave it out.
    """
    own = part_of(gradient)
    if own.numel():
        return gradient
    zeros = own.new_zeros([max(size, 1) for size in own.shape])
    if not isinstance(gradient, DTensor):
        return zeros
    layout = gradient.device_mesh, gradient.placements
    return DTensor.from_local(zeros, *layout, run_check=False, shape=gradient.shape, stride=gradient.stride())


def _placement(gradient: torch.Tensor) -> str:
    """Return a key that is equal for gradients of which torch can take the norm together."""
    return f"{gradient.device_mesh} {gradient.placements}" if isinstance(gradient, DTensor) else ""


@torch.no_grad()
def scale_to_norm(gradients: Iterable[torch.Tensor], total: torch.Tensor, max_norm: float) -> None:
    """Scale gradients of norm `total` down to norm `max_norm`, as `torch.nn.utils.clip_grad_norm_` does."""
    factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for gradient in map(local, gradients):
        gradient.mul_(factor.to(gradient.device, gradient.dtype))


def spread_infinities(
    parameters: Iterable[nn.Parameter], groups: Sequence[CollectiveGroup], scaler: GradScaler
) -> None:
    """Fill the gradients of all ranks with infinity if one rank has a non-finite gradient: each `GradScaler` skips its step.

    The scaler of a rank without gradients notes the infinity as well, so that all ranks keep one scale.
    """
    gradients = [local(parameter.grad) for parameter in parameters if parameter.grad is not None]
    finite = [gradient.isfinite().all() for gradient in gradients]
    is_finite = not finite or bool(torch.stack(finite).all())  # a GPU is waited for once
    has_infinity = torch.tensor(float(not is_finite), device="cpu")
    for group in groups:
        has_infinity = group.max(has_infinity)
    if has_infinity:
        for gradient in gradients:
            gradient.fill_(torch.inf)
    if not gradients:
        note_infinity(scaler, has_infinity=bool(has_infinity))
