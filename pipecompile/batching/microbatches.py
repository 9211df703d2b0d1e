"""A mini-batch taken apart into micro-batches, and their outputs put together the same way.

Sizes differ by at most one sample (`torch.tensor_split`); a batch smaller than the number of micro-batches gives as
many as it has samples.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property, lru_cache, reduce
from itertools import accumulate, pairwise
from typing import Any

import torch

from pipecompile.batching.batch_dims import BatchDims, Dims, scatter, sizes
from pipecompile.batching.call_inputs import FlatInputs, count_leaves, flatten_target
from pipecompile.errors import InputError
from pipecompile.torch_private import pytree
from pipecompile.torch_private.storages import foreach_mul

__all__ = [
    "How",
    "Join",
    "MiniBatch",
    "fewer",
    "gather",
    "loss_weights",
    "scaled",
    "scatter_tree",
    "sizes",
    "ungather",
    "weighed",
]


def fewer(parts: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """The same samples in fewer and fewer micro-batches; the last one is the whole mini-batch."""
    return (sizes(sum(parts), count) for count in range(len(parts) - 1, 0, -1))


class MiniBatch:
    """One call's inputs in micro-batches of these sizes.

    `first` is the call of the first micro-batch. `values[i]` has leaf i of every micro-batch, `dims[i]` says how it was
    taken from the whole, and `origins[m][i]` which leaf of the whole it comes from in micro-batch m.
    """

    def __init__(self, whole: FlatInputs, sizes: tuple[int, ...]) -> None:
        self.whole, self.sizes = whole, sizes
        self.shares = tuple(whole.shares(len(sizes))) if whole.lists else ()

    @property
    def first(self) -> FlatInputs:
        return self.shares[0] if self.shares else self.whole.part([part[0] for part in self.values], self.sizes[0])

    @cached_property
    def values(self) -> list[Sequence[Any]]:
        if self.shares:
            return list(zip(*(share.leaves for share in self.shares), strict=True))
        pairs = zip(self.whole.leaves, self.whole.dims, strict=True)
        return [scatter(leaf, dim, len(self.sizes)) for leaf, dim in pairs]

    @property
    def dims(self) -> Dims:
        return self.shares[0].dims if self.shares else self.whole.dims

    @property
    def origins(self) -> Sequence[Sequence[int]]:
        if not self.shares:
            return [range(len(self.whole.leaves))] * len(self.sizes)
        found: list[list[int]] = [[] for _ in self.sizes]
        start = 0
        for name, *values in zip(self.whole.arguments, *(share.values for share in self.shares), strict=True):
            for m, count in enumerate(map(count_leaves, values)):
                found[m] += range(start, start + count)
                start += count if name in self.whole.lists else 0
            start += 0 if name in self.whole.lists else count_leaves(values[0])
        return found


def scatter_tree(target: Any, count: int, samples: int | None, batch_dims: BatchDims) -> Sequence[Any]:
    """The micro-batches of a nested structure. Raises InputError when a tensor in it has another number of samples."""
    if isinstance(target, torch.Tensor) and target.dim() and target.shape[0] == samples and not batch_dims:
        return scatter(target, 0, count)
    if samples is None:
        return [target]
    if batch_dims.get("target", 0) is list:
        return _in_parts(target, count, samples)
    leaves, spec, dims = flatten_target(target, batch_dims, samples)
    parts = [scatter(leaf, dim, count) for leaf, dim in zip(leaves, dims, strict=True)]
    return [pytree.tree_unflatten([part[m] for part in parts], spec) for m in range(count)]


def _in_parts(target: Any, count: int, samples: int) -> list[Any]:
    if not isinstance(target, (list, tuple)) or len(target) != samples:
        found = f"{len(target)} entries" if isinstance(target, (list, tuple)) else f"a {type(target).__name__}"
        raise InputError(
            f"the target is a list with an entry per sample, says batch_dims; it is {found}, for {samples} samples"
        )
    bounds = [*accumulate(sizes(samples, count), initial=0)]
    return [target[start:end] for start, end in pairwise(bounds)]


@lru_cache(maxsize=256)
def loss_weights(parts: tuple[int, ...], *, mean: bool) -> tuple[Sequence[float], Sequence[torch.Tensor]]:
    """What each micro-batch counts in the loss: as numbers, and as gradients of the micro-batches' losses."""
    weights = [size / sum(parts) if mean else 1.0 for size in parts]
    with torch.inference_mode(False):
        return weights, torch.tensor(weights, dtype=torch.float64).unbind()  # autograd rounds to the loss's dtype


def weighed(losses: list[torch.Tensor], weights: Sequence[float]) -> torch.Tensor:
    """The loss of the mini-batch from those of its micro-batches, added in their order."""
    with torch.no_grad():
        first, *others = foreach_mul(losses, weights)
        return reduce(torch.Tensor.add_, others, first)


def scaled(
    gradients: Sequence[torch.Tensor], scaler: torch.amp.GradScaler, device: torch.device
) -> Sequence[torch.Tensor]:
    """The gradients of the micro-batches' losses under a scaler, which keeps its scale on `device`."""
    with torch.inference_mode(False), torch.no_grad():
        return scaler.scale(torch.stack(list(gradients)).to(device)).unbind()


class How(Enum):
    """How one output is put together from those of the micro-batches."""

    JOINED = "joined along a dimension"
    AVERAGED = "averaged by size"
    ADDED = "added up"
    SAME = "the same for all"
    LISTED = "in a list with an entry per sample"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Join:
    """`dim` is where parts are joined, `why` is why they cannot be."""

    how: How
    dim: int | None = None
    why: str = ""


def gather(parts: Sequence[torch.Tensor], join: Join, sizes: Sequence[int]) -> Any:
    """One output from its micro-batches, which have these sizes; what is in a list with an entry per sample stays apart."""
    if join.how is How.LISTED:
        return list(parts)
    if len(parts) == 1 or join.how is How.SAME:
        return parts[-1]
    if join.dim is not None:
        return torch.cat(tuple(parts), join.dim)
    if join.how is How.ADDED:
        return torch.stack(tuple(parts)).sum(0, dtype=parts[0].dtype)
    return torch.stack([part * (size / sum(sizes)) for part, size in zip(parts, sizes, strict=True)]).sum(0)


def ungather(gradient: Any, parts: Sequence[torch.Tensor], join: Join, sizes: Sequence[int]) -> Sequence[Any]:
    """The gradient of an output taken apart as the output was put together."""
    if join.how is How.LISTED:
        return list(gradient)
    if gradient is None:
        return [None] * len(parts)
    if join.dim is not None:
        return torch.split(gradient, [part.shape[join.dim] for part in parts], join.dim)
    if len(parts) == 1 or join.how is How.SAME:
        return [*[None] * (len(parts) - 1), gradient]
    return [gradient if join.how is How.ADDED else gradient * (size / sum(sizes)) for size in sizes]
