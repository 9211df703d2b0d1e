"""A mini-batch taken apart into micro-batches, and their outputs put together the same way.

Sizes differ by at most one sample (`torch.tensor_split`); a batch smaller than the number of micro-batches gives as
many as it has samples.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import Any

import torch
from torch.utils import _pytree as pytree

from pipecompile.tracing.inputs.batch_dims import BatchDims
from pipecompile.tracing.inputs.flat import flatten_target

__all__ = ["How", "Join", "fewer", "gather", "loss_weights", "scatter", "scatter_tree", "sizes", "ungather"]


def sizes(samples: int, count: int) -> tuple[int, ...]:
    """How many samples each of `count` micro-batches has."""
    small, larger = divmod(samples, count)
    return tuple(small + (i < larger) for i in range(count))


def fewer(parts: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """The same samples in fewer and fewer micro-batches; the last one is the whole mini-batch."""
    return (sizes(sum(parts), count) for count in range(len(parts) - 1, 0, -1))


def scatter(leaf: Any, dim: int | None, count: int) -> Sequence[Any]:
    """The micro-batches of one flat leaf: slices along its batch dimension, or the thing itself for each."""
    return (leaf,) * count if dim is None else torch.tensor_split(leaf, count, dim)


def scatter_tree(target: Any, count: int, samples: int | None, batch_dims: BatchDims) -> Sequence[Any]:
    """The micro-batches of a nested structure. Raises InputError when a tensor in it has another number of samples."""
    if isinstance(target, torch.Tensor) and target.dim() and target.shape[0] == samples and not batch_dims:
        return torch.tensor_split(target, count)
    if samples is None:
        return [target]
    leaves, spec, dims = flatten_target(target, batch_dims, samples)
    parts = [scatter(leaf, dim, count) for leaf, dim in zip(leaves, dims, strict=True)]
    return [pytree.tree_unflatten([part[m] for part in parts], spec) for m in range(count)]


@lru_cache(maxsize=256)
def loss_weights(parts: tuple[int, ...], *, mean: bool) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
    """What each micro-batch counts in the loss, as one tensor and as gradients of the micro-batches' losses."""
    with torch.inference_mode(False):
        weights = torch.tensor([size / sum(parts) if mean else 1.0 for size in parts], dtype=torch.float64)
        return weights, weights.unbind()  # float64: autograd rounds to the loss's dtype


class How(Enum):
    """How one output is put together from those of the micro-batches."""

    JOINED = "joined along a dimension"
    AVERAGED = "averaged by size"
    ADDED = "added up"
    SAME = "the same for all"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Join:
    """`dim` is where parts are joined, `why` is why they cannot be."""

    how: How
    dim: int | None = None
    why: str = ""


def gather(parts: Sequence[torch.Tensor], join: Join, sizes: Sequence[int]) -> torch.Tensor:
    """One output from its micro-batches, which have these sizes."""
    if len(parts) == 1 or join.how is How.SAME:
        return parts[-1]
    if join.dim is not None:
        return torch.cat(tuple(parts), join.dim)
    if join.how is How.ADDED:
        return torch.stack(tuple(parts)).sum(0, dtype=parts[0].dtype)
    return torch.stack([part * (size / sum(sizes)) for part, size in zip(parts, sizes, strict=True)]).sum(0)


def ungather(
    gradient: torch.Tensor | None, parts: Sequence[torch.Tensor], join: Join, sizes: Sequence[int]
) -> Sequence[Any]:
    """The gradient of an output taken apart as the output was put together."""
    if gradient is None:
        return [None] * len(parts)
    if join.dim is not None:
        return torch.split(gradient, [part.shape[join.dim] for part in parts], join.dim)
    if len(parts) == 1 or join.how is How.SAME:
        return [*[None] * (len(parts) - 1), gradient]
    return [gradient if join.how is How.ADDED else gradient * (size / sum(sizes)) for size in sizes]
