"""The user's functions that a model's forward may call: found by following names from its classes, without running code."""

from __future__ import annotations

import functools
import operator
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any, TypeVar

import torch
from torch import nn

from pipecompile.torch_private import pytree
from pipecompile.tracing.container_items import size_of, values_in
from pipecompile.tracing.loaded_names import imported_modules, names_in

__all__ = [
    "CachedFunction",
    "ReachableCode",
    "closure_tensors",
    "has_content",
    "is_foreign",
    "reachable",
    "searches_kept",
]

T = TypeVar("T")

_FOREIGN = frozenset(sys.stdlib_module_names) | {"torch", "sympy", "numpy", "pipecompile"}
"""Packages whose code is not followed."""


@dataclass(frozen=True, slots=True)
class CachedFunction:
    """A function with a cache. `holder` is the class, the globals of the module, or the variable of a closure, that has it under `name`."""

    holder: dict[str, Any] | type | CellType
    name: str
    function: functools._lru_cache_wrapper[Any]


@dataclass(slots=True)
class ReachableCode:
    """Python functions, functions with a cache, and the objects that functions name as globals or have in closures."""

    functions: list[FunctionType] = field(default_factory=list)
    caches: list[CachedFunction] = field(default_factory=list)
    objects: list[Any] = field(default_factory=list)
    _results: dict[str, Any] = field(default_factory=dict)

    def once(self, name: str, compute: Callable[[], T]) -> T:
        """Return the result of `compute`, which depends on this code alone. It is computed once for a search that is kept."""
        if name not in self._results:
            self._results[name] = compute()
        result: T = self._results[name]
        return result


def reachable(model: nn.Module, most: int | None = None) -> ReachableCode:
    """Return the methods of the model's classes, the functions that they name, and so on, transitively.

    Code of torch, of its libraries and of Python's standard library is left out. With `most`, return at most `most` functions, the nearest first.
    """
    roots = [value for module in model.modules() for value in (type(module), *_attributes(module))]
    kept = _kept.get() if most is None else None
    if kept is not None and (found := kept.get(id(model))) is not None and found.is_current(roots):
        return found.code
    search = _CodeSearch(model, roots)
    search.run(most)
    if kept is not None:
        kept[id(model)] = search
    return search.code


_kept: ContextVar[dict[int, _CodeSearch] | None] = ContextVar("kept searches", default=None)


@contextmanager
def searches_kept() -> Iterator[None]:
    """Keep the search of a model's code while the block runs, and repeat it only if something that it has read is another object.

    A search of a model of transformers follows 6,000 functions and classes; compiling asks for it a dozen times.
    """
    token = _kept.set({} if (kept := _kept.get()) is None else kept)
    try:
        yield
    finally:
        _kept.reset(token)


class _CodeSearch:
    """One search, and what it has read: per namespace, names are followed once, since thousands of functions share them."""

    def __init__(self, model: nn.Module, roots: list[Any]) -> None:
        self.code = ReachableCode()
        self._model, self._roots = model, roots
        self._seen: dict[int, Any] = {}
        self._followed: dict[int, set[str]] = {}
        self._module_names: dict[int, frozenset[str]] = {}
        self._read: dict[int, tuple[Mapping[str, Any], list[str], list[Any]]] = {}
        self._sizes: dict[int, tuple[Mapping[str, Any], int]] = {}
        self._closures: list[tuple[FunctionType, list[Any]]] = []

    def run(self, most: int | None) -> None:
        pending, code = deque(self._roots), self.code
        following = pending.pop if most is None else pending.popleft
        while pending and (most is None or len(code.functions) < most):
            value = following()
            if id(value) not in self._seen:
                self._seen[id(value)] = value
                pending += self.visit(value, code)

    def is_current(self, roots: list[Any]) -> bool:
        """Return whether a search would read the same objects now."""
        return (
            _are(roots, self._roots)
            and all(len(space) == size for space, size in self._sizes.values())
            and all(
                all(map(operator.is_, map(space.get, names), values)) for space, names, values in self._read.values()
            )
            and all(_are(_enclosed(function), values) for function, values in self._closures)
        )

    def visit(self, value: Any, code: ReachableCode) -> Iterable[Any]:
        """Add what `value` names and holds to `code`, and return the values to search next."""
        if type(value) is FunctionType:
            enclosed = _enclosed(value)
            inside = [held for held in enclosed if callable(held) or isinstance(held, _CONTAINERS)]
            if value.__closure__:
                self._closures.append((value, enclosed))
            if is_foreign(value):
                return inside
            code.functions.append(value)
            code.caches += _enclosed_caches(value)
            code.objects += [*enclosed, *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
            return [*inside, *self._named(value, code)]
        if isinstance(value, type):
            return (
                ()
                if is_foreign(value)
                else [*value.__bases__, *self._values(vars(value), list(vars(value)), value, code)]
            )
        return _within(value)

    def _named(self, function: FunctionType, code: ReachableCode) -> Iterator[Any]:
        """Yield the globals that a function names; of a global that is a module, the attributes that the function names."""
        scope, names = function.__globals__, names_in(function.__code__)
        modules = self._modules(scope)
        yield from self._values(scope, self._new(scope, names - modules), scope, code)
        self._note_read(scope, scope, new := self._new(scope, names & modules), [scope[name] for name in new])
        held = [scope[name] for name in sorted(names & modules)]
        for space in (vars(module) for module in (*held, *imported_modules(function))):
            if space.get("__name__", "").partition(".")[0] not in _FOREIGN:
                yield from self._values(space, self._new(space, names), space, code)

    def _modules(self, scope: dict[str, Any]) -> frozenset[str]:
        """Return the globals that are modules."""
        if id(scope) not in self._module_names:
            self._module_names[id(scope)] = frozenset(n for n, value in scope.items() if isinstance(value, ModuleType))
        return self._module_names[id(scope)]

    def _new(self, space: dict[str, Any], names: frozenset[str]) -> list[str]:
        """Return those names of a namespace that are new to the search, in an order that does not depend on hashes."""
        self._sizes.setdefault(id(space), (space, len(space)))
        followed = self._followed.setdefault(id(space), set())
        new = (names - followed) & space.keys()
        followed |= new
        return sorted(new)

    def _note_read(
        self, holder: dict[str, Any] | type, space: Mapping[str, Any], names: Sequence[str], values: Sequence[Any]
    ) -> None:
        """Note what a namespace had under these names. One list per namespace makes `is_current` a few loops in C."""
        _, all_names, all_values = self._read.setdefault(id(holder), (space, [], []))
        all_names += names
        all_values += values

    def _values(
        self, space: Mapping[str, Any], names: Sequence[str], holder: dict[str, Any] | type, code: ReachableCode
    ) -> list[Any]:
        values = [space[name] for name in names]
        self._note_read(holder, space, names, values)
        self._sizes.setdefault(id(holder), (space, len(space)))
        code.objects += values
        for name, value in zip(names, values, strict=True):
            if _is_cached(value):
                code.caches.append(CachedFunction(holder, name, value))
        return values


_MOST_ITEMS = 20
"""Items of a container that is searched for functions, such as the terms of a loss. What is larger is a registry."""

_CONTAINERS = (list, tuple, dict)


def _are(now: Sequence[Any], then: Sequence[Any]) -> bool:
    return len(now) == len(then) and all(map(operator.is_, now, then))


def _attributes(module: nn.Module) -> Iterator[Any]:
    """Yield functions set on the instance, its hooks, and the classes of its helper objects."""
    for value in vars(module).values():
        if isinstance(value, dict):
            yield from (hook for hook in values_in(value) if not isinstance(hook, nn.Module) and callable(hook))
        elif not isinstance(value, nn.Module):
            yield value if callable(value) else type(value)


def _within(value: Any) -> Iterable[Any]:
    """Return the functions inside a wrapper or a small container, which have no name of their own."""
    if isinstance(value, _CONTAINERS):
        is_small = size_of(value) <= _MOST_ITEMS
        return [one for one in values_in(value) if type(one) is FunctionType] if is_small else ()
    if isinstance(value, (staticmethod, classmethod, MethodType)):
        return (value.__func__,)
    if isinstance(value, property):
        return (value.fget, value.fset)
    if isinstance(value, (functools.partial, functools.cached_property)):
        return (value.func,)
    if isinstance(value, functools._lru_cache_wrapper):
        return (value.__wrapped__,)
    is_object = callable(value) and not isinstance(value, nn.Module)
    return (type(value),) if is_object and not is_foreign(type(value)) else ()


def _enclosed_caches(function: FunctionType) -> list[CachedFunction]:
    """Return the functions with a cache in the closure of a function, as a decorator of methods keeps them."""
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    pairs = [(name, cell, cell.cell_contents) for name, cell in cells if has_content(cell)]
    return [CachedFunction(cell, name, held) for name, cell, held in pairs if _is_cached(held)]


def _is_cached(value: Any) -> bool:
    return isinstance(value, functools._lru_cache_wrapper)


def _enclosed(function: FunctionType) -> list[Any]:
    """Return what a function closes over."""
    return [cell.cell_contents for cell in function.__closure__ or () if has_content(cell)]


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
            leaves = pytree.tree_leaves([_enclosed(value), value.__defaults__, value.__kwdefaults__])
            yield from (leaf for leaf in leaves if isinstance(leaf, torch.Tensor))
            pending += [leaf for leaf in leaves if callable(leaf)]


def has_content(cell: Any) -> bool:
    """Return whether a cell of a closure has a value other than None."""
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def is_foreign(value: Any) -> bool:
    """Return whether a function, class or module is of torch, its libraries, Python or pipecompile: not the user's."""
    module = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", "")
    return str(module).partition(".")[0] in _FOREIGN
