"""Names of attributes that a loss function reads, sets or deletes, by itself or through what it calls: `layer.aux = None` after it has read
`aux`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import CodeType, FunctionType, MethodType
from typing import Any

from torch import nn

from pipecompile.tracing.loaded_names import attribute_names, bound_attributes, names_in
from pipecompile.tracing.state.function_state import functions_near

__all__ = ["bound_by_loss", "named_by_loss"]


def bound_by_loss(loss: Callable[..., Any] | None) -> frozenset[str]:
    """Return the names that code of a loss binds, and code that it names; a forward, which the loss reads from, does not count."""
    return frozenset().union(*map(bound_attributes, _codes(loss)))


def named_by_loss(loss: Callable[..., Any] | None) -> frozenset[str]:
    """Return the names by which code of a loss, and code that it names, may reach attributes and keys."""
    return frozenset().union(*(attribute_names(code) | names_in(code) for code in _codes(loss)))


def _codes(loss: Callable[..., Any] | None) -> list[CodeType]:
    first, functions = _first(loss), functions_near(loss)
    pending = [first] if isinstance(first, FunctionType) else []
    named = dict.fromkeys(pending)
    while pending:
        code = pending.pop().__code__
        names = {*attribute_names(code), *names_in(code)} - {"forward"}
        new = [one for one in functions if one.__name__ in names and one not in named]
        named |= dict.fromkeys(new)
        pending += new
    return [one.__code__ for one in named]


def _first(function: Any) -> Any:
    """Return the function that a call runs first: that of a method or a partial, and `__call__` or `forward` of an object."""
    if isinstance(function, partial):
        return _first(function.func)
    if isinstance(function, (MethodType, FunctionType)):
        return getattr(function, "__func__", function)
    return getattr(type(function), "forward" if isinstance(function, nn.Module) else "__call__", None)
