"""The user's functions that a model's forward may call: found by following names from its classes, without running code."""

from __future__ import annotations

import dis
import functools
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from pipecompile.torch_private import pytree
from pipecompile.tracing.container_items import values_in

__all__ = [
    "CachedFunction",
    "ReachableCode",
    "closure_tensors",
    "loaded_globals",
    "named_values",
    "names_in",
    "reachable",
]

_FOREIGN = frozenset(sys.stdlib_module_names) | {"torch", "sympy", "numpy", "pipecompile"}
"""Packages whose code is not followed."""

_known: dict[int, tuple[CodeType, frozenset[str]]] = {}
"""Cache of `names_in` by id: the code object, which stays alive here, and its names."""

_LOAD_GLOBAL, _LOAD_NAME, _EXTENDED = dis.opmap["LOAD_GLOBAL"], dis.opmap["LOAD_NAME"], dis.opmap["EXTENDED_ARG"]

_known_loads: dict[int, tuple[CodeType, frozenset[str]]] = {}
"""Cache by id: the code object, which stays alive here, and the globals that it loads."""


@dataclass(frozen=True, slots=True)
class CachedFunction:
    """A function with a cache. `holder` is the class, or the globals of the module, that has it under `name`."""

    holder: dict[str, Any] | type
    name: str
    function: functools._lru_cache_wrapper[Any]


@dataclass(slots=True)
class ReachableCode:
    """Python functions, functions with a cache, and the objects that functions name as globals or have in closures."""

    functions: list[FunctionType] = field(default_factory=list)
    caches: list[CachedFunction] = field(default_factory=list)
    objects: list[Any] = field(default_factory=list)


def reachable(model: nn.Module, most: int | None = None) -> ReachableCode:
    """Return the methods of the model's classes, the functions that they name, and so on, transitively.

    Code of torch, of its libraries and of Python's standard library is left out. With `most`, return so many functions, the nearest first.
    """
    code = ReachableCode()
    seen: dict[int, Any] = {}
    pending = [value for module in model.modules() for value in (type(module), *_attributes(module))]
    while pending and (most is None or len(code.functions) < most):
        value = pending.pop(-1 if most is None else 0)
        if id(value) in seen:
            continue
        seen[id(value)] = value
        if type(value) is FunctionType and not _is_foreign(value):
            code.functions.append(value)
        named = list(_named(value))
        code.objects += [*(held for _, _, held in named), *_held(value)]
        code.caches += [CachedFunction(*where) for where in named if isinstance(where[2], functools._lru_cache_wrapper)]
        pending += (*_within(value), *(value for _, _, value in named))
    return code


def _attributes(module: nn.Module) -> Iterator[Any]:
    """Yield functions set on the instance, its hooks, and the classes of its helper objects."""
    for value in vars(module).values():
        if isinstance(value, dict):
            yield from (hook for hook in values_in(value) if not isinstance(hook, nn.Module) and callable(hook))
        elif not isinstance(value, nn.Module):
            yield value if callable(value) else type(value)


def _within(value: Any) -> Iterable[Any]:
    """Return the functions and classes inside a value that have no name of their own: of a wrapper, bases of a class."""
    if isinstance(value, (staticmethod, classmethod, MethodType)):
        return (value.__func__,)
    if isinstance(value, property):
        return (value.fget, value.fset)
    if isinstance(value, (functools.partial, functools.cached_property)):
        return (value.func,)
    if isinstance(value, type):
        return () if _is_foreign(value) else value.__bases__
    if type(value) is FunctionType:
        return _wrapped(value)
    return (value.__wrapped__,) if isinstance(value, functools._lru_cache_wrapper) else ()


def _wrapped(function: FunctionType) -> list[Any]:
    """Return what a function closes over and can call: the function inside a decorator."""
    cells = [cell.cell_contents for cell in function.__closure__ or () if _is_full(cell)]
    return [value for value in cells if callable(value)]


def _held(value: Any) -> list[Any]:
    """Return what a function of the user's closes over and has as defaults."""
    if type(value) is not FunctionType or _is_foreign(value):
        return []
    cells = [cell.cell_contents for cell in value.__closure__ or () if _is_full(cell)]
    return [*cells, *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]


def closure_tensors(function: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in the closure and the defaults of a function, and in functions and containers there."""
    seen: dict[int, Any] = {}
    pending = [function]
    while pending:
        value = pending.pop()
        if id(value) in seen:
            continue
        seen[id(value)] = value
        if isinstance(value, (functools.partial, MethodType)):
            pending += [value.func, *value.args, *value.keywords.values()] if isinstance(value, functools.partial) else [value.__func__]  # fmt: skip
        elif type(value) is FunctionType:
            enclosed = [cell.cell_contents for cell in value.__closure__ or () if _is_full(cell)]
            leaves = pytree.tree_leaves([enclosed, value.__defaults__, value.__kwdefaults__])
            yield from (leaf for leaf in leaves if isinstance(leaf, torch.Tensor))
            pending += [leaf for leaf in leaves if callable(leaf)]


def named_values(functions: Iterable[FunctionType]) -> Iterator[Any]:
    """Yield the globals that these functions name, and what they close over and have as defaults; not what is inside those."""
    for function in functions:
        yield from (value for _, _, value in _named(function))
        yield from (cell.cell_contents for cell in function.__closure__ or () if _is_full(cell))
        yield from (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())


def _is_full(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def _named(owner: Any) -> Iterator[tuple[Any, str, Any]]:
    """Yield (holder, name, value) of the attributes of a class, or of the globals that a function names.

    If a global is a module, yield the attributes of the module that the function names.
    """
    if isinstance(owner, type) and not _is_foreign(owner):
        yield from ((owner, name, value) for name, value in vars(owner).items())
    if type(owner) is not FunctionType or _is_foreign(owner):
        return
    names = names_in(owner.__code__)
    for name in names & owner.__globals__.keys():
        value = owner.__globals__[name]
        if not isinstance(value, ModuleType):
            yield owner.__globals__, name, value
        elif value.__name__.partition(".")[0] not in _FOREIGN:
            yield from ((vars(value), inner, vars(value)[inner]) for inner in names & vars(value).keys())


def names_in(code: CodeType) -> frozenset[str]:
    """Return the globals and attributes that code names, also in the functions inside it."""
    if id(code) not in _known:
        inner = [names_in(constant) for constant in code.co_consts if isinstance(constant, CodeType)]
        _known[id(code)] = code, frozenset(code.co_names).union(*inner)
    return _known[id(code)][1]


def loaded_globals(code: CodeType) -> frozenset[str]:
    """Return the names of the globals that code loads, without names of attributes."""
    if id(code) not in _known_loads:
        inner = [loaded_globals(constant) for constant in code.co_consts if isinstance(constant, CodeType)]
        _known_loads[id(code)] = code, frozenset(_loads(code)).union(*inner)
    return _known_loads[id(code)][1]


def _loads(code: CodeType) -> list[str]:
    """Return the globals that one code object loads. The argument of LOAD_GLOBAL has a flag in bit 0."""
    body, names, extended = code.co_code, [], 0
    for position in range(0, len(body), 2):
        operation, argument = body[position], body[position + 1] | extended
        extended = argument << 8 if operation == _EXTENDED else 0
        if operation == _LOAD_GLOBAL:
            names.append(code.co_names[argument >> 1])
        elif operation == _LOAD_NAME:
            names.append(code.co_names[argument])
    return names


def _is_foreign(value: Any) -> bool:
    return str(getattr(value, "__module__", "")).partition(".")[0] in _FOREIGN
