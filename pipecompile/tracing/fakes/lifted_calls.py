"""Calls of torch with lifted numbers: a number that changes between steps may enter values, and no shape."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from pipecompile.torch_private import pytree
from pipecompile.tracing.fakes.lifted_numbers import LiftedInt, NotLiftedError, examples, lifted_in

__all__ = ["check_shapes"]

_ARITHMETIC = frozenset(
    "add sub mul div true_divide floor_divide remainder pow rsub eq ne lt le gt ge fmod tensor full_like masked_fill fill where clamp"
    " truediv floordiv mod radd rmul rdiv rtruediv rpow rmod rfloordiv iadd isub imul itruediv new_tensor as_tensor setitem".split()
)
"""Functions whose results have the same shape and the same rows for every int."""


def check_shapes(function: Callable[..., Any], arguments: Any, result: Any) -> None:
    """Raise NotLiftedError if another number would give a result of another shape. Call this on fake tensors.

    Among the arguments of most functions an int is a dimension, an index or a size.
    """
    numbers = list(lifted_in(arguments))
    if not numbers:
        return
    name = getattr(function, "__name__", "call")
    if any(isinstance(number, LiftedInt) for number in numbers) and name.strip("_") not in _ARITHMETIC | {"make"}:
        raise NotLiftedError(numbers[0], f"{name} takes it as a constant")
    args, kwargs = examples(arguments, _another)
    try:
        other = function(*args, **kwargs)
    except Exception as error:
        raise NotLiftedError(numbers[0], f"{name} does not take every number") from error
    if _metadata(other) != _metadata(result):
        raise NotLiftedError(numbers[0], f"the shape of {name}'s result depends on it")


def _another(number: Any) -> Any:
    """Return another number of the same type: between 0 and 1 for a rate."""
    return number + 1 if isinstance(number, int) else 0.75 * number or 0.25


def _metadata(result: Any) -> list[Any]:
    return [
        (leaf.dtype, *map(str, leaf.shape), *map(str, leaf.stride())) if isinstance(leaf, torch.Tensor) else type(leaf)
        for leaf in pytree.tree_leaves(result)
    ]
