"""Arguments that are lists with an entry per sample: micro-batches share them out by entries.

    model([a, b, c, d], [s, t, u, v])     ──►     model([a, b], [s, t])     model([c, d], [u, v])

How long a list is, is part of a recording, so all micro-batches get equally many entries, of the same shapes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from pipecompile.batching.batch_dims import BatchDims
from pipecompile.errors import InputError
from pipecompile.torch_private import pytree

if TYPE_CHECKING:
    from pipecompile.batching.call_inputs import FlatInputs

__all__ = ["different", "entries", "listed_names", "lists_of_tensors"]


def listed_names(batch_dims: BatchDims) -> frozenset[str]:
    """The arguments that are said to be such lists."""
    return frozenset(name for name, dim in batch_dims.items() if dim is list)


def entries(arguments: Mapping[str, Any], names: frozenset[str]) -> int | None:
    """How many entries all these lists have; None when no such list is given.

    Raises InputError for what is no list, and for lists of different length.
    """
    given = {name: value for name, value in arguments.items() if name in names and value is not None}
    for name, value in given.items():
        if not isinstance(value, (list, tuple)):
            raise InputError(
                f"batch_dims says that {name} is a list with an entry per sample; it is a {type(value).__name__}"
            )
    lengths = {name: len(value) for name, value in given.items()}
    if len(set(lengths.values())) > 1:
        raise InputError("lists with an entry per sample have different lengths",
                         where=", ".join(f"{name}: {length}" for name, length in lengths.items()))  # fmt: skip
    return next(iter(lengths.values()), None)


def lists_of_tensors(arguments: Mapping[str, Any]) -> Iterator[str]:
    """Arguments that may be such lists, although nobody said so."""
    for name, value in arguments.items():
        if isinstance(value, list) and value and all(map(_some_tensor, value)):
            yield name


def different(first: FlatInputs, other: FlatInputs, number: int) -> str:
    """The first leaf in which micro-batch `number` is not like micro-batch 0."""
    for name, one, two in zip(first.names, first.leaves, other.leaves, strict=False):
        if _look(one) != _look(two):
            return f"{name} is {_look(one)} in micro-batch 0, {_look(two)} in micro-batch {number}"
    return f"micro-batch 0 has {len(first.leaves)} values, micro-batch {number} has {len(other.leaves)}"


def _look(leaf: Any) -> str:
    return f"{leaf.dtype} {tuple(leaf.shape)}" if isinstance(leaf, torch.Tensor) else repr(leaf)


def _some_tensor(entry: Any) -> bool:
    return any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(entry))
