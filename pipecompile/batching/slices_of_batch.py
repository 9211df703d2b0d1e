"""A mini-batch divided into slices: micro-batches along the batch, and each along its sequence, which is dimension 1.

x (8, 64)    2 micro-batches of 4 slices    8 parts (4, 16): slices 0 to 3 of micro-batch 0, then those of micro-batch 1
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from pipecompile.batching.call_inputs import FlatInputs
from pipecompile.batching.containers import flatten_containers
from pipecompile.batching.microbatches import MiniBatch, scatter_tree
from pipecompile.errors import InputError
from pipecompile.torch_private import pytree

__all__ = ["SlicedBatch", "sequence_length", "sliced_target"]

_SEQUENCE = 1
"""The dimension of the sequence in inputs and targets."""


class SlicedBatch(MiniBatch):
    """The inputs of one call in slices of `length` positions. `sizes` has the samples of each slice."""

    def __init__(self, batch: MiniBatch, n_slices: int) -> None:
        super().__init__(batch.whole, batch.sizes)
        total = sequence_length(batch.whole)
        if total % n_slices:
            raise InputError(
                f"a sequence of {total} positions cannot be divided into {n_slices} equal slices",
                why="all slices run the same recording",
                hint=f"sequences of {total - total % n_slices + n_slices} positions, with padding that the loss ignores",
            )
        self.length, self.n_slices = total // n_slices, n_slices
        self.sizes = tuple(size for size in batch.sizes for _ in range(n_slices))
        self.values = [_slices(parts, total, n_slices) for parts in batch.values]


def sequence_length(inputs: FlatInputs) -> int:
    """Return the number of positions: the size of dimension 1 of the first input that has samples and two dimensions. Raise InputError."""
    pairs = zip(inputs.leaves, inputs.dims, strict=True)
    lengths = [leaf.shape[_SEQUENCE] for leaf, dim in pairs if dim == 0 and leaf.dim() > _SEQUENCE]
    if not lengths or inputs.lists:
        raise InputError(
            "no input has a sequence to slice",
            why="the batch is dimension 0 of inputs, and the sequence dimension 1",
            hint='inputs of shape (batch, length, ...); or schedule="1f1b"',
        )
    if any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in inputs.leaves):
        raise InputError(
            "an input requires a gradient", why="slices return no gradients of inputs", hint='schedule="1f1b"'
        )
    return int(lengths[0])


def sliced_target(target: Any, batch: SlicedBatch) -> Sequence[Any]:
    """Return the target of each slice. Raise InputError if a tensor of the target has no dimension of positions."""
    total, n_parts = batch.length * batch.n_slices, len(batch.sizes) // batch.n_slices
    parts = []
    for part in scatter_tree(target, n_parts, batch.whole.samples, {}):
        leaves, spec = flatten_containers(part)
        sliced = [_slices([leaf], total, batch.n_slices) for leaf in leaves]
        if any(isinstance(leaf, torch.Tensor) and not _is_sequence(leaf, total) for leaf in leaves):
            raise InputError(
                f"the target has no dimension of {total} positions",
                why="each slice of the sequence has a loss of its own",
                hint='a target of shape (batch, length, ...); or schedule="1f1b"',
            )
        parts += [pytree.tree_unflatten([one[place] for one in sliced], spec) for place in range(batch.n_slices)]
    return parts


def _is_sequence(leaf: Any, total: int) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.dim() > _SEQUENCE and leaf.shape[_SEQUENCE] == total


def _slices(parts: Sequence[Any], total: int, n_slices: int) -> list[Any]:
    """Return the slices of each micro-batch of a leaf; a leaf without positions is the same for all slices."""
    return [
        piece
        for part in parts
        for piece in (part.chunk(n_slices, _SEQUENCE) if _is_sequence(part, total) else [part] * n_slices)
    ]
