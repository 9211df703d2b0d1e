"""The arguments of `plan_for` as the `compile` lines repeat them: inputs by name, plain values as they are."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

from torch import nn

from pipecompile.batching.batch_dims import BatchDims

__all__ = ["input_words"]

_PLAIN = (bool, int, float, str, type(None))


def input_words(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any] | None, batch_dims: BatchDims | None
) -> str:
    """Return `example_args=`, `example_kwargs=` and `batch_dims=`, those that are not empty.

    A single positional tensor is `x`; several have the names of the parameters of `forward`.
    """
    words = []
    if args:
        names = _positional_names(model, len(args)) if len(args) > 1 or kwargs else ["x"]
        values = [_written(value, name) for value, name in zip(args, names, strict=True)]
        words.append(f"example_args=({', '.join(values)}{',' * (len(values) == 1)})")
    if kwargs:
        pairs = ", ".join(f'"{name}": {_written(value, name)}' for name, value in kwargs.items())
        words.append(f"example_kwargs={{{pairs}}}")
    if batch_dims:
        pairs = ", ".join(f'"{name}": {_dim(dim)}' for name, dim in batch_dims.items())
        words.append(f"batch_dims={{{pairs}}}")
    return ", ".join(words)


def _positional_names(model: nn.Module, count: int) -> list[str]:
    """Return `count` names: those of the parameters of `forward`, and `x3` for what has none, number 3 of `*args`."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    known = [name for name, each in inspect.signature(model.forward).parameters.items() if each.kind in kinds][:count]
    return [name or f"x{place}" for place, name in zip_longest(range(count), known)]


def _written(value: Any, name: str) -> str:
    return repr(value) if type(value) in _PLAIN else name


def _dim(dim: Any) -> str:
    return dim.__name__ if isinstance(dim, type) else repr(dim)
