"""A call without samples: the part of the batch of a copy of the pipeline, if there are fewer samples than copies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from pipecompile.batching.batch_dims import BatchDims, apply_batch_dims, default_dims
from pipecompile.batching.call_inputs import flatten_target, leaf_slots, target_slots
from pipecompile.batching.containers import flatten_containers
from pipecompile.batching.microbatches import scatter_tree

__all__ = ["has_no_samples", "require_no_target"]


def has_no_samples(
    forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], batch_dims: BatchDims
) -> bool:
    """Return whether the batch of a call of `forward` has 0 samples. Tensors of 1 sample beside it are shared."""
    leaves, _ = flatten_containers((args, kwargs))
    if not any(isinstance(leaf, torch.Tensor) and not leaf.numel() for leaf in leaves):
        return False
    dims = default_dims(leaves)
    if batch_dims:
        dims, _ = apply_batch_dims(dims, leaves, leaf_slots(forward, args, kwargs), batch_dims)
    lengths = {leaf.shape[dim] for leaf, dim in zip(leaves, dims, strict=True) if isinstance(dim, int)}
    return 0 in lengths and lengths <= {0, 1}


def require_no_target(target: Any, batch_dims: BatchDims) -> None:
    """Raise InputError if the target of a batch of 0 samples has samples. Tensors of 1 sample are shared."""
    if batch_dims.get("target", 0) is list:
        if target:
            scatter_tree(target, 1, 0, batch_dims)
        return
    leaves, _ = flatten_containers(target)
    dims = default_dims(leaves)
    if batch_dims:
        dims, _ = apply_batch_dims(dims, leaves, target_slots(target), batch_dims)
    if any(leaf.shape[dim] > 1 for leaf, dim in zip(leaves, dims, strict=True) if isinstance(dim, int)):
        flatten_target(target, batch_dims, 0)
