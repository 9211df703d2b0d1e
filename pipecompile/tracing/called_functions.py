"""The functions of the user that a call may run, and the objects that they have at hand: found by names, without running code.

    hook = lambda layer, inputs, output: owner.note(output)

    hook ──► owner, which it closes over ──► type(owner).note ──► the objects that `note` names, ...

`reachable` finds all code near a model: whole libraries, for a model of transformers. This finds what one call leads to: names count
as attributes of the objects at hand, and of nothing else.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from functools import cached_property, partial
from types import FunctionType, MethodType, ModuleType
from typing import Any

from torch import nn

from pipecompile.torch_private.modules import children_of
from pipecompile.tracing.reachable_code import has_content, is_foreign
from pipecompile.tracing.state.snapshot import can_hold, places_of

__all__ = ["CalledFunctions"]

_MOST = 300
"""Functions that are followed."""


class CalledFunctions:
    """The functions that these callables run. `owner` is at hand for those that are not methods: the module of a block."""

    def __init__(self, begins: Sequence[Any], owner: nn.Module | None = None) -> None:
        self._objects: dict[int, Any] = {id(owner): owner} if owner is not None else {}
        self._found: dict[tuple[FunctionType, int], None] = {}
        pending = [pair for one in begins for pair in _plain(one, owner)]
        while pending and len(self._found) < _MOST:
            function, own = pending.pop()
            if (function, id(own)) not in self._found and not is_foreign(function):
                self._found[function, id(own)] = None
                pending += self._named(function, own)

    @cached_property
    def functions(self) -> tuple[FunctionType, ...]:
        """The functions."""
        return tuple(dict.fromkeys(function for function, _ in self._found))

    @cached_property
    def containers(self) -> list[Any]:
        """The containers that the objects at hand lead to."""
        return [place.container for place in places_of(*self._objects.values(), deep=True)]

    def _named(self, function: FunctionType, own: Any) -> Iterator[tuple[FunctionType, Any]]:
        """Yield the functions that a function names or closes over, each with its object."""
        names = function.__code__.co_names
        at_hand = [own, *(cell.cell_contents for cell in function.__closure__ or () if has_content(cell))]
        at_hand += [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
        at_hand += [function.__globals__[name] for name in names if name in function.__globals__]
        for one in at_hand:
            if isinstance(one, (FunctionType, MethodType, partial)):
                yield from _plain(one, None)
            elif isinstance(one, ModuleType):
                held = [vars(one)[name] for name in names if name in vars(one)] if not is_foreign(one) else []
                yield from (pair for value in held if type(value) is FunctionType for pair in _plain(value, None))
            elif _is_state(one):
                self._objects[id(one)] = one
                yield from self._methods(one, names)

    def _methods(self, one: Any, names: Sequence[str]) -> Iterator[tuple[FunctionType, Any]]:
        """Yield the methods of an object with these names, and the forwards of its layers and the calls of its objects with these names."""
        for name in names:
            method = inspect.getattr_static(type(one), name, None)
            method = method.fget if isinstance(method, property) else method
            if isinstance(method, FunctionType):
                yield method, one
            held = vars(one).get(name) if hasattr(one, "__dict__") else None
            child = children_of(one).get(name) if isinstance(one, nn.Module) else None
            for layer in child.modules() if child is not None else ():
                yield from _plain(layer.forward, None)
            if held is not None and _is_state(held):
                self._objects[id(held)] = held
                yield from self._calls(held, names)

    @staticmethod
    def _calls(held: Any, names: Sequence[str]) -> Iterator[tuple[FunctionType, Any]]:
        """Yield the methods with these names of an object that another one holds, and its own call."""
        for name in ("__call__", *names):
            method = inspect.getattr_static(type(held), name, None)
            if isinstance(method, FunctionType):
                yield method, held


def _is_state(value: Any) -> bool:
    """Return whether a value is an object or a container that may hold what Python leaves."""
    return can_hold(value) and not isinstance(value, (FunctionType, MethodType, partial, type))


def _plain(value: Any, own: Any) -> Iterator[tuple[FunctionType, Any]]:
    """Yield the function behind a callable with the object that it belongs to, or `own`."""
    if type(value) is FunctionType:
        yield value, own
    elif isinstance(value, MethodType):
        yield from _plain(value.__func__, value.__self__)
    elif isinstance(value, partial):
        bound = (*value.args, *value.keywords.values())
        yield from _plain(value.func, next(filter(_is_state, bound), own))
        yield from (pair for one in bound if callable(one) for pair in _plain(one, None))
    elif _is_state(value) and isinstance(call := inspect.getattr_static(type(value), "__call__", None), FunctionType):
        yield call, value
