"""Gradients of which each rank has some, looked at as one: their norm, and whether all of them are finite."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from pipecompile.distributed.collectives import CollectiveGroup
from pipecompile.torch_private.dtensors import local

__all__ = ["scaled_to_norm", "spread_infinities", "total_norm"]


def total_norm(gradients: Sequence[torch.Tensor], norm_type: float, pipeline: CollectiveGroup) -> torch.Tensor:
    """Of the gradients of all ranks of a pipeline. Those in parts on several ranks are counted once, by DTensor."""
    total = torch.zeros((), dtype=torch.float64)
    for _, alike in groupby(sorted(gradients, key=_where), key=_where):
        norm = torch.nn.utils.get_total_norm([*alike], norm_type)
        norm = (norm.full_tensor() if isinstance(norm, DTensor) else norm).to(total)
        total = torch.maximum(total, norm) if norm_type == torch.inf else total + norm**norm_type
    return pipeline.largest(total) if norm_type == torch.inf else pipeline.sum(total) ** (1 / norm_type)


def _where(gradient: torch.Tensor) -> str:
    """What gradients have in common that torch can take the norm of together."""
    return f"{gradient.device_mesh} {gradient.placements}" if isinstance(gradient, DTensor) else ""


def scaled_to_norm(gradients: Iterable[torch.Tensor], total: torch.Tensor, max_norm: float) -> None:
    """Shrink the gradients, which have this norm, to `max_norm`."""
    factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for gradient in map(local, gradients):
        gradient.mul_(factor.to(gradient.device, gradient.dtype))


def spread_infinities(parameters: Iterable[nn.Parameter], groups: Sequence[CollectiveGroup]) -> None:
    """When a gradient on any rank is not finite, make those on all ranks so: then each `GradScaler` skips its step."""
    gradients = [local(parameter.grad) for parameter in parameters if parameter.grad is not None]
    found = torch.tensor(float(not all(bool(gradient.isfinite().all()) for gradient in gradients)))
    for group in groups:
        found = group.largest(found)
    if found:
        for gradient in gradients:
            gradient.fill_(torch.inf)
