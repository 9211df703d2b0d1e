"""Sharded tensors (DTensor): this rank's part, the whole tensor, and states of sharded models."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

__all__ = ["fitted", "gradient_of", "like", "local", "part_of", "whole_of"]


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of a tensor in this rank's memory: all of a tensor that is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def part_of(tensor: DTensor) -> torch.Tensor:
    """Return this rank's part, without autograd; `to_local` records. 2.11."""
    return tensor._local_tensor


def like(pattern: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    """Return the tensor of which each rank has its `own` elements, with the shape and sharding of `pattern`."""
    if not isinstance(pattern, DTensor):
        return own.view(pattern.shape)
    shaped, layout = own.view(part_of(pattern).shape), (pattern.device_mesh, pattern.placements)
    return DTensor.from_local(shaped, *layout, run_check=False, shape=pattern.shape, stride=pattern.stride())


def gradient_of(parameter: nn.Parameter) -> torch.Tensor:
    """Return a parameter's gradient, or zeros, sharded as the parameter is."""
    gradient = parameter.grad
    if gradient is None:
        return torch.zeros_like(parameter)
    if isinstance(gradient, DTensor) and isinstance(parameter, DTensor):
        return gradient.redistribute(placements=parameter.placements)
    return gradient


def whole_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole tensor, on every rank. A collective call: every rank must make it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def fitted(state: Mapping[str, Any], tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state dict in which each tensor is sharded as its namesake in `tensors`. A collective call."""
    fitted_state: Any = copy.copy(state)  # with its metadata
    for key, value in state.items():
        pattern = tensors.get(key)
        if isinstance(pattern, DTensor) and isinstance(value, torch.Tensor) and not isinstance(value, DTensor):
            fitted_state[key] = distribute_tensor(value, pattern.device_mesh, pattern.placements, src_data_rank=None)
        elif isinstance(value, DTensor) and not isinstance(pattern, DTensor):
            fitted_state[key] = value.full_tensor()
    return fitted_state  # type: ignore[no-any-return]
