"""Tensors of which each rank has a part: that part, and the whole around it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

__all__ = ["gradient_of", "like", "local", "whole_of"]


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What of it is in this rank's memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def like(pattern: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    """The tensor of which each rank has its `own` elements, laid out as `pattern` is."""
    if not isinstance(pattern, DTensor):
        return own.view(pattern.shape)
    shaped, layout = own.view(pattern._local_tensor.shape), (pattern.device_mesh, pattern.placements)
    return DTensor.from_local(shaped, *layout, run_check=False, shape=pattern.shape, stride=pattern.stride())


def gradient_of(parameter: nn.Parameter) -> torch.Tensor:
    """Its gradient, or zeros, laid out as the parameter is."""
    gradient = parameter.grad
    if gradient is None:
        return torch.zeros_like(parameter)
    if isinstance(gradient, DTensor) and isinstance(parameter, DTensor):
        return gradient.redistribute(placements=parameter.placements)
    return gradient


def whole_of(value: Any) -> Any:
    """All of a tensor, on every rank, each of which must ask; anything else as it is."""
    return value.full_tensor() if isinstance(value, DTensor) else value
