"""Objects that a call created around a function: found by following what the function holds, and copied together.

    seen = []                                      lambda ─► cell ─► seen          each copy of the lambda has a list of its own;
    h.register_hook(lambda g: seen.append(g))                                      two functions copied with one memo share the list

Objects from before the call are not copied. Tensors and sizes of the call are replaced by those of the present run.
"""

from __future__ import annotations

import copy
import dis
import threading
import warnings
from collections import defaultdict, deque
from collections.abc import Container, Iterator, Mapping
from functools import partial
from types import BuiltinMethodType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch

from pipecompile.torch_private.modes import FakeTensor
from pipecompile.tracing.container_items import CONTAINERS, builtin_type, keys_in, refill, values_in
from pipecompile.tracing.fakes.lifted_numbers import LiftedNumber
from pipecompile.tracing.state.hidden_containers import Slots

__all__ = [
    "Copies", "assigned_in", "assigned_variables", "empty_copy", "is_of_call", "is_state", "parts_of", "variables_of",
]  # fmt: skip

_LEAVES = (FakeTensor, torch.SymInt, torch.SymFloat, torch.SymBool, LiftedNumber)
_ATOMS = (
    *(
        bool,
        int,
        float,
        complex,
        str,
        bytes,
        type(None),
        type(...),
        type,
        ModuleType,
        CodeType,
        torch.Tensor,
        torch.Size,
    ),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, slice, range),
    *(type(threading.Lock()), type(threading.RLock())),
)
"""Types whose values are not copied: they do not change, or are meant to be shared."""
_UNCHANGING = (tuple, frozenset, partial, MethodType, BuiltinMethodType, CellType, FunctionType)


def is_of_call(value: Any) -> bool:
    """Return whether a value is a tensor of the call, or a size or number that a graph computes."""
    return isinstance(value, _LEAVES)


def assigned_variables(code: CodeType) -> set[str]:
    """Return the variables of enclosing functions that the code, or functions in it, assign."""
    inner = [name for one in code.co_consts if isinstance(one, CodeType) for name in assigned_variables(one)]
    stored = [one.argval for one in dis.get_instructions(code) if one.opname in ("STORE_DEREF", "DELETE_DEREF")]
    return {name for name in (*inner, *stored) if name in code.co_freevars}


def variables_of(function: FunctionType) -> dict[str, CellType]:
    """Return the variables that a function closes over, by name."""
    return dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))


def assigned_in(made: dict[int, Any]) -> Iterator[int]:
    """Yield the ids of the variables that functions among the objects assign."""
    for function in made.values():
        if isinstance(function, FunctionType) and function.__closure__:
            names = assigned_variables(function.__code__)
            yield from (id(cell) for name, cell in variables_of(function).items() if name in names and id(cell) in made)


def parts_of(value: Any) -> list[Any]:
    """Return what a value holds directly, in a fixed order. An atom, or a leaf, holds nothing."""
    if isinstance(value, type) and _is_local(value):
        return _closing_over(value)
    if isinstance(value, (*_LEAVES, *_ATOMS)):
        return []
    if isinstance(value, CellType):
        return _content(value)
    if isinstance(value, FunctionType):
        defaults = (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
        return [*(value.__closure__ or ()), *defaults, *vars(value).values()]
    if isinstance(value, MethodType):
        return [value.__func__, value.__self__]
    if isinstance(value, BuiltinMethodType):
        return [value.__self__]
    if isinstance(value, partial):
        return [value.func, *value.args, *value.keywords.values()]
    kind = type(value)
    return [
        *_items(value),
        *(one for _, one in _attributes(value)),
        *([kind] if _is_local(kind) and _closing_over(kind) else ()),
    ]


def is_state(value: Any) -> bool:
    """Return whether a value can change, variables that functions assign apart."""
    if isinstance(value, FunctionType):
        return bool(vars(value))
    if isinstance(value, type) and _is_local(value):
        return bool(_closing_over(value) or _plain_attributes(value))
    return not isinstance(value, (*_LEAVES, *_ATOMS, *_UNCHANGING))


def _is_local(kind: type) -> bool:
    """Return whether a class is defined in a function."""
    return "<locals>" in kind.__qualname__


def _closing_over(kind: type) -> list[FunctionType]:
    """Return the functions of a class that read variables of functions around it."""
    functions = [one for one in vars(kind).values() if isinstance(one, FunctionType)]
    return [one for one in functions if {*one.__code__.co_freevars} - {"__class__"}]


def _plain_attributes(kind: type) -> list[str]:
    """Return the names of the attributes of a class that are neither functions nor private."""
    return [
        name
        for name, one in vars(kind).items()
        if not (name.startswith("_") or callable(one) or hasattr(one, "__get__"))
    ]


def _content(cell: CellType) -> list[Any]:
    try:
        return [cell.cell_contents]
    except ValueError:  # not assigned yet
        return []


def _items(value: Any) -> list[Any]:
    """Return the keys and values of a mapping, the items of another container."""
    if not isinstance(value, CONTAINERS):
        return []
    return [*(keys_in(value) if isinstance(value, dict) else ()), *values_in(value)]


def _attributes(value: Any) -> list[tuple[str, Any]]:
    attributes = getattr(value, "__dict__", None)
    return [*(attributes.items() if isinstance(attributes, dict) else ()), *Slots(value).pairs()]


class Copies:
    """Copies of objects for one micro-batch. `memo` has the copies of what can change, which all functions of the micro-batch share.

    `made` are the objects that the call made, by id, `assigned` the ids of variables that functions assign, `leaves` what takes the place
    of tensors and sizes of the call, by id.
    """

    def __init__(
        self, made: Mapping[int, Any], assigned: Container[int], memo: dict[int, Any], leaves: Mapping[int, Any]
    ) -> None:
        self._made, self._assigned, self._lasting, self._leaves = made, assigned, memo, leaves
        self._passing: dict[int, Any] = {}

    def of(self, value: Any) -> Any:
        """Return the copy of an object that the call made; any other value as it is."""
        key = id(value)
        if key in self._leaves:
            return self._leaves[key]
        if key not in self._made or isinstance(value, _ATOMS):
            return value
        memo = self._memo(value)
        return memo[key] if key in memo else self._copy(value, memo)

    def _memo(self, value: Any) -> dict[int, Any]:
        return self._lasting if is_state(value) or id(value) in self._assigned else self._passing

    def _copy(self, value: Any, memo: dict[int, Any]) -> Any:
        if isinstance(value, FunctionType):
            return self._function(value, memo)
        if isinstance(value, CellType):
            memo[id(value)] = CellType()
            return self._fill_cell(value)
        if isinstance(value, _UNCHANGING):
            return memo.setdefault(id(value), self._unchanging(value))
        new = memo[id(value)] = empty_copy(value)
        if isinstance(value, dict):
            pairs = zip(keys_in(value), values_in(value), strict=True)
            refill(new, [(self.of(key), self.of(item)) for key, item in pairs])
        elif isinstance(value, CONTAINERS):
            refill(new, [self.of(item) for item in values_in(value)])
        for name, one in _attributes(value):
            object.__setattr__(new, name, self.of(one))
        return new

    def _function(self, value: FunctionType, memo: dict[int, Any]) -> FunctionType:
        """Return the copy of a function, which its own variables may hold."""
        cells = value.__closure__ or ()
        empty = [cell for cell in cells if id(cell) in self._made and id(cell) not in self._memo(cell)]
        for cell in empty:
            self._memo(cell)[id(cell)] = CellType()
        new = FunctionType(value.__code__, value.__globals__, value.__name__, None, tuple(map(self.of, cells)))
        memo[id(value)] = new
        for cell in empty:
            self._fill_cell(cell)
        new.__defaults__ = None if value.__defaults__ is None else tuple(map(self.of, value.__defaults__))
        new.__kwdefaults__ = {name: self.of(one) for name, one in (value.__kwdefaults__ or {}).items()} or None
        new.__qualname__, new.__module__ = value.__qualname__, value.__module__
        new.__dict__.update({name: self.of(one) for name, one in vars(value).items()})
        return new

    def _fill_cell(self, cell: CellType) -> CellType:
        new: CellType = self._memo(cell)[id(cell)]
        for content in _content(cell):
            new.cell_contents = self.of(content)
        return new

    def _unchanging(self, value: Any) -> Any:
        """Return the copy of a tuple, a frozenset, a partial or a method."""
        if isinstance(value, MethodType):
            return MethodType(self.of(value.__func__), self.of(value.__self__))
        if isinstance(value, BuiltinMethodType):
            return getattr(self.of(value.__self__), value.__name__)
        if isinstance(value, partial):
            keywords = {name: self.of(one) for name, one in value.keywords.items()}
            return type(value)(self.of(value.func), *map(self.of, value.args), **keywords)
        return builtin_type(value).__new__(type(value), [self.of(item) for item in values_in(value)])


def empty_copy(value: Any) -> Any:
    """Return an object of the same type without items, to be given attributes; of an object of C a copy. Raise an exception if neither can
    be made.
    """
    if isinstance(value, type):
        raise TypeError("a class is one")
    if isinstance(value, CONTAINERS):
        new = builtin_type(value).__new__(type(value))
        if isinstance(value, deque):
            deque.__init__(new, (), value.maxlen)
        elif isinstance(value, defaultdict):
            new.default_factory = value.default_factory
        return new
    try:
        return object.__new__(type(value))
    except TypeError:  # a type of C
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of iterators, from Python 3.12 on
            return copy.copy(value)
