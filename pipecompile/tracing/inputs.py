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
    """Leaves of (args, kwargs) in pytree order, and the structure to put them back. Cheap: made anew in every step."""

    forward: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    leaves: tuple[Any, ...]
    spec: pytree.TreeSpec

    @property
    def names(self) -> tuple[str, ...]:
        """Leaves are named after the parameter of `forward` that they arrive in: x, mask, pair_0 ..."""
        positional = _positional_names(self.forward, len(self.args))
        paths, _ = pytree.tree_flatten_with_path((self.args, self.kwargs))
        return tuple(_leaf_name(path, positional) for path, _ in paths)

    @property
    def arguments(self) -> tuple[str, ...]:
        """The parameters of `forward` that were given, in the order of the call."""
        return (*_positional_names(self.forward, len(self.args)), *self.kwargs)


def flatten(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> FlatInputs:
    """Flatten a call of `forward`."""
    leaves, spec = pytree.tree_flatten((args, kwargs))
    return FlatInputs(forward, args, kwargs, tuple(leaves), spec)


def _positional_names(forward: Callable[..., Any], count: int) -> list[str]:
    names: list[str] = []
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
    found = {leaf.shape[0] for leaf in inputs.leaves if is_batched(leaf)}
    if len(found) == 1 and (size := found.pop()) > 0:
        return int(size)
    sizes = {name: leaf.shape[0] for name, leaf in zip(inputs.names, inputs.leaves, strict=True) if is_batched(leaf)}
    if len(set(sizes.values())) > 1:
        listing = ", ".join(f"{name}: {size}" for name, size in sizes.items())
        raise InputError("the batch sizes of the inputs disagree", where=listing, why="dimension 0 of every input tensor is the batch",
                         hint="give tensors the same first dimension; pass what all samples share as 0-dim tensor or number")  # fmt: skip
    if sizes:
        raise InputError("the batch is empty", where=", ".join(f"{name}: 0 samples" for name in sizes))
    return None


def validate_model(model: object) -> nn.Module:
    """Raise InputError for anything that is not an `nn.Module`."""
    if not isinstance(model, nn.Module):
        raise InputError(
            f"the model is a {type(model).__name__}, not an nn.Module", hint="wrap the function in a module"
        )
    return model
