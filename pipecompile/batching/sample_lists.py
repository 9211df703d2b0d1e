"""Arguments that are lists with one entry per sample: each micro-batch gets a slice of the entries.

    model([a, b, c, d], [s, t, u, v])     ──►     model([a, b], [s, t])     model([c, d], [u, v])

The length of a list is a part of the recorded graph, so all micro-batches get equally many entries, of the same shapes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from pipecompile.batching.batch_dims import BatchDims, batch_dims_text
from pipecompile.errors import InputError
from pipecompile.text.shown_value import type_text
from pipecompile.torch_private import pytree

__all__ = ["list_length", "listed_names", "lists_of_tensors", "with_list_hint"]


def listed_names(batch_dims: BatchDims) -> frozenset[str]:
    """Return the arguments that `batch_dims` declares as lists with one entry per sample."""
    return frozenset(name for name, dim in batch_dims.items() if dim is list)


def list_length(arguments: Mapping[str, Any], names: frozenset[str]) -> int | None:
    """Return the common length, in samples, of the lists among the arguments; None if all are absent or None.

    Raise InputError for a value that is not a list, and for lists of different lengths.
    """
    lists = {name: value for name, value in arguments.items() if name in names and value is not None}
    for name, value in lists.items():
        if not isinstance(value, (list, tuple)):
            raise InputError(
                f"batch_dims declares {name} as a list with one entry per sample, but {name} is {type_text(value)}",
                hint=f"pass a list for {name}, or remove {name} from batch_dims",
            )
    lengths = {name: len(value) for name, value in lists.items()}
    if len(set(lengths.values())) > 1:
        first, *others = lengths.items()
        shared = ", ".join(f'"{name}": None' for name, length in others if length != first[1])
        raise InputError(
            "lists with one entry per sample have different lengths",
            where=", ".join(f"{name}: {length}" for name, length in lengths.items()),
            hint=f"one entry per sample in each; batch_dims={{{shared}}} for what all samples share",
        )
    return next(iter(lengths.values()), None)


def lists_of_tensors(arguments: Mapping[str, Any]) -> Iterator[str]:
    """Yield the arguments that look like such lists: non-empty, with a tensor in each entry."""
    for name, value in arguments.items():
        if isinstance(value, list) and value and all(map(_holds_tensor, value)):
            yield name


def with_list_hint(error: InputError, arguments: Mapping[str, Any]) -> InputError:
    """Return an error of inputs. Where batch sizes disagree and lists have one length, say how to declare an entry per sample."""
    lists = list(lists_of_tensors(arguments))
    lengths = {len(arguments[name]) for name in lists}
    if "disagree" not in error.what or len(lengths) != 1 or lengths == {1}:
        return error
    hint = f"{batch_dims_text((name, list) for name in lists)}, if there is an entry per sample; else {error.hint}"
    return InputError(error.what, where=error.where, why=error.why, hint=hint)


def _holds_tensor(entry: Any) -> bool:
    return any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(entry))
