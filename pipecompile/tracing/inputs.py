"""The inputs of a model as flat leaves, and their fake twins whose batch dimension is a symbol.

A *batched* leaf is a tensor with at least one dimension; its dimension 0 is the batch. Tensors without dimensions and
everything that is not a tensor are the same for every micro-batch.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from pipecompile.errors import InputError

__all__ = ["FlatInputs", "batch_size", "flatten", "is_batched"]


@dataclass(frozen=True, slots=True)
class FlatInputs:
    """Leaves of (args, kwargs) in pytree order, a readable name for each, and the structure to put them back."""

    leaves: tuple[Any, ...]
    names: tuple[str, ...]
    spec: pytree.TreeSpec
    arguments: tuple[str, ...]


def flatten(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> FlatInputs:
    """Flatten a call. Leaves are named after the parameter of `forward` that they arrive in: x, mask, pair_0 ..."""
    paths, spec = pytree.tree_flatten_with_path((args, kwargs))
    positional = _positional_names(forward, len(args))
    names = tuple(_leaf_name(path, positional) for path, _ in paths)
    return FlatInputs(tuple(leaf for _, leaf in paths), names, spec, (*positional, *kwargs))


def _positional_names(forward: Callable[..., Any], count: int) -> list[str]:
    names = []
    for parameter in inspect.signature(forward).parameters.values():
        if parameter.kind is parameter.VAR_POSITIONAL:
            names += [f"{parameter.name}_{i}" for i in range(count - len(names))]
        elif parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            names.append(parameter.name)
    return (names + [f"arg_{i}" for i in range(len(names), count)])[:count]


def _leaf_name(path: tuple[Any, ...], positional: list[str]) -> str:
    side, first, *rest = (_key(entry) for entry in path)
    head = positional[int(first)] if side == "0" else first
    return "_".join([head, *rest])


def _key(entry: Any) -> str:
    for attribute in ("idx", "key", "name"):
        if hasattr(entry, attribute):
            return str(getattr(entry, attribute))
    return "item"


def is_batched(leaf: object) -> bool:
    """Does micro-batching slice this leaf?"""
    return isinstance(leaf, torch.Tensor) and leaf.dim() > 0


def batch_size(inputs: FlatInputs) -> int | None:
    """The size that all batched leaves share along dimension 0; None when there is no batched leaf.

    Raises InputError when they disagree, or when the batch is empty.
    """
    sizes = {name: leaf.shape[0] for name, leaf in zip(inputs.names, inputs.leaves, strict=True) if is_batched(leaf)}
    if len(set(sizes.values())) > 1:
        listing = ", ".join(f"{name}: {size}" for name, size in sizes.items())
        raise InputError("the batch sizes of the inputs disagree", where=listing, why="dimension 0 of every input tensor is the batch",
                         hint="give tensors the same first dimension; pass what all samples share as 0-dim tensor or number")  # fmt: skip
    size = next(iter(sizes.values()), None)
    if size == 0:
        raise InputError("the batch is empty", where=", ".join(f"{name}: {size} samples" for name in sizes))
    return size


def validate_model(model: object) -> nn.Module:
    """Raise InputError for anything that is not an `nn.Module`."""
    if not isinstance(model, nn.Module):
        raise InputError(f"the model is a {type(model).__name__}, not an nn.Module", hint="wrap the function in a module")
    return model
