"""The user's functions that a model's forward may come to: followed by name from its classes, without running anything."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from pipecompile.torch_private import pytree

__all__ = ["CachedFunction", "ReachableCode", "closure_tensors", "names_in", "reachable"]

_FOREIGN = frozenset(sys.stdlib_module_names) | {"torch", "sympy", "numpy", "pipecompile"}

_known: dict[int, tuple[CodeType, frozenset[str]]] = {}


@dataclass(frozen=True, slots=True)
class CachedFunction:
    """A function with a cache, and where it is found: under a name in the globals of a module or in a class."""

    holder: dict[str, Any] | type
    name: str
    function: functools._lru_cache_wrapper[Any]


@dataclass(slots=True)
class ReachableCode:
    """Functions in Python, and those among them that have a cache."""

    functions: list[FunctionType] = field(default_factory=list)
    caches: list[CachedFunction] = field(default_factory=list)


def reachable(model: nn.Module) -> ReachableCode:
    """Methods of the model's classes, what they name, what that names, and so on; no functions of libraries below torch."""
    found = ReachableCode()
    seen: dict[int, Any] = {}
    waiting = [thing for module in model.modules() for thing in (type(module), *_attributes(module))]
    while waiting:
        thing = waiting.pop()
        if id(thing) in seen:
            continue
        seen[id(thing)] = thing
        if type(thing) is FunctionType and not _is_foreign(thing):
            found.functions.append(thing)
        named = list(_named(thing))
        found.caches += [
            CachedFunction(*where) for where in named if isinstance(where[2], functools._lru_cache_wrapper)
        ]
        waiting += (*_within(thing), *(value for _, _, value in named))
    return found


def _attributes(module: nn.Module) -> Iterator[Any]:
    """Functions that were put on an instance, its hooks, and the classes of its helpers."""
    for value in vars(module).values():
        if isinstance(value, dict):
            yield from (hook for hook in value.values() if not isinstance(hook, nn.Module) and callable(hook))
        elif not isinstance(value, nn.Module):
            yield value if callable(value) else type(value)


def _within(thing: Any) -> Iterable[Any]:
    """What is part of a thing without a name of its own."""
    if isinstance(thing, (staticmethod, classmethod, MethodType)):
        return (thing.__func__,)
    if isinstance(thing, property):
        return (thing.fget, thing.fset)
    if isinstance(thing, (functools.partial, functools.cached_property)):
        return (thing.func,)
    if isinstance(thing, type):
        return () if _is_foreign(thing) else thing.__bases__
    if type(thing) is FunctionType:
        return _wrapped(thing)
    return (thing.__wrapped__,) if isinstance(thing, functools._lru_cache_wrapper) else ()


def _wrapped(function: FunctionType) -> list[Any]:
    """What a decorator hides."""
    cells = [cell.cell_contents for cell in function.__closure__ or () if _is_full(cell)]
    return [thing for thing in cells if callable(thing)]


def closure_tensors(function: Any) -> Iterator[torch.Tensor]:
    """The tensors that a function has in its closure, also those in functions and containers there."""
    seen: dict[int, Any] = {}
    waiting = [function]
    while waiting:
        thing = waiting.pop()
        if id(thing) in seen:
            continue
        seen[id(thing)] = thing
        if isinstance(thing, (functools.partial, MethodType)):
            waiting += [thing.func, *thing.args, *thing.keywords.values()] if isinstance(thing, functools.partial) else [thing.__func__]  # fmt: skip
        elif type(thing) is FunctionType:
            held = [cell.cell_contents for cell in thing.__closure__ or () if _is_full(cell)]
            leaves = pytree.tree_leaves([held, thing.__defaults__, thing.__kwdefaults__])
            yield from (leaf for leaf in leaves if isinstance(leaf, torch.Tensor))
            waiting += [leaf for leaf in leaves if callable(leaf)]


def _is_full(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def _named(thing: Any) -> Iterator[tuple[Any, str, Any]]:
    """What a class holds; the globals that a function names, and what it names of modules among them: where, and what."""
    if isinstance(thing, type) and not _is_foreign(thing):
        yield from ((thing, name, value) for name, value in vars(thing).items())
    if type(thing) is not FunctionType or _is_foreign(thing):
        return
    names = names_in(thing.__code__)
    for name in names & thing.__globals__.keys():
        value = thing.__globals__[name]
        if not isinstance(value, ModuleType):
            yield thing.__globals__, name, value
        elif value.__name__.partition(".")[0] not in _FOREIGN:
            yield from ((vars(value), inner, vars(value)[inner]) for inner in names & vars(value).keys())


def names_in(code: CodeType) -> frozenset[str]:
    """The globals and attributes that a piece of code names, also in the functions inside it."""
    if id(code) not in _known:
        inner = [names_in(constant) for constant in code.co_consts if isinstance(constant, CodeType)]
        _known[id(code)] = code, frozenset(code.co_names).union(*inner)
    return _known[id(code)][1]


def _is_foreign(thing: Any) -> bool:
    return str(getattr(thing, "__module__", "")).partition(".")[0] in _FOREIGN
