"""Sharded tensors (DTensor): this rank's part, the whole tensor, states of sharded models, and results of collectives under way."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

__all__ = [
    "cut_further",
    "fitted",
    "gradient_of",
    "is_redistribution",
    "like",
    "local",
    "part_of",
    "set_part",
    "waited",
    "whole_of",
]


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of a tensor in this rank's memory: all of a tensor that is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def part_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part, without autograd; `to_local` records. 2.11."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor.data


def waited(value: Any) -> Any:
    """Return the values of the result of a collective that may be under way, as a plain tensor without autograd, once they are there, or
    once the current stream waits for them. Any other value is returned itself. 2.11.

    Layers of tensor parallelism return such results; each is a subclass that waits when an operation uses it, but not when it is sent.
    """
    return value.trigger_wait() if isinstance(value, AsyncCollectiveTensor) else value  # type: ignore[no-untyped-call]


def set_part(tensor: torch.Tensor, own: torch.Tensor) -> None:
    """Give a tensor other memory on this rank. DTensors refuse `tensor.data = own`. 2.11."""
    if isinstance(tensor, DTensor):
        tensor._local_tensor = own
    else:
        tensor.data = own


def cut_further(tensor: torch.Tensor, own: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    """Return a tensor whose parts are cut once more, as `fully_shard` cuts them: along the first dimension, over the ranks of a dimension
    of `mesh`. This rank keeps `own`.

    mesh    replicas, the ranks that cut, the dimensions of a DTensor     the ranks of the last replicate a plain tensor
    """
    inner = tensor.placements if isinstance(tensor, DTensor) else (Replicate(),) * ("tp" in (mesh.mesh_dim_names or ()))
    sizes = mesh.shape[mesh.ndim - len(inner) :]
    parts = math.prod(size for size, one in zip(sizes, inner, strict=True) if one == Shard(0))
    cut = Shard(0) if parts == 1 else _StridedShard(0, split_factor=parts)
    replicas = (Replicate(),) * (mesh.ndim - len(inner) - 1)
    placements = *replicas, cut if tensor.dim() else Replicate(), *inner
    stride = torch.empty(tensor.shape, device="meta").stride()
    return DTensor.from_local(own, mesh, placements, run_check=False, shape=tensor.shape, stride=stride)


def like(pattern: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    """Return the tensor of which each rank has its `own` elements, with the shape and sharding of `pattern`."""
    shaped = own.view(part_of(pattern).shape).detach()  # a view that was made without grad cannot be written with it
    if not isinstance(pattern, DTensor):
        return shaped
    layout = pattern.device_mesh, pattern.placements
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


def is_redistribution(target: object) -> bool:
    """Return whether a function of autograd, or a recorded call of it, makes a DTensor of a local tensor, the other way round, or moves
    the elements of one between ranks. 2.11.
    """
    function = getattr(target, "autograd_function", target)
    return getattr(function, "__module__", "").startswith("torch.distributed.tensor.")


def fitted(state: Mapping[str, Any], tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state dict in which each tensor is sharded as its namesake in `tensors`. A collective call."""
    fitted_state: Any = copy.copy(state)  # with its metadata
    for key, value in state.items():
        pattern = tensors.get(key)
        if isinstance(value, torch.Tensor) and _layout(value) != _layout(pattern):
            fitted_state[key] = whole = whole_of(value)
            if isinstance(pattern, DTensor):
                fitted_state[key] = distribute_tensor(whole, *_layout(pattern), src_data_rank=None)
    return fitted_state  # type: ignore[no-any-return]


def _layout(tensor: Any) -> Any:
    """Return the mesh and the placements of a DTensor; nothing for another tensor."""
    return (tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else ()
