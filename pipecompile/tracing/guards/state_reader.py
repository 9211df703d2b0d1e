"""The walk from a model along everything that its recording read, to the values on which the recording depends.

module or object     its class, and the attributes that were read: on the instance, in the tables of a module, on the class
list, dict, deque    every item
function             its code, defaults and variables of its closure; the globals that its code loads
class, module        the attributes that the code of the functions names
tensor               its identity and metadata; its contents are read by the graph at every run
"""

from __future__ import annotations

import argparse
import functools
import os
import queue
import sys
import threading
from collections import ChainMap, UserDict, UserList, deque
from collections.abc import Container, Iterable, Mapping
from contextvars import ContextVar
from operator import attrgetter
from types import CodeType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import nn

from pipecompile.torch_private.modules import GLOBAL_BACKWARD_HOOKS, GLOBAL_FORWARD_HOOKS, users_hooks
from pipecompile.tracing.container_items import CONTAINERS
from pipecompile.tracing.guards.attribute_reads import AttributeReads, Reads
from pipecompile.tracing.guards.container_state import add_container, is_atom
from pipecompile.tracing.guards.executed_code import functions_of, source_of, without_variables
from pipecompile.tracing.guards.library_state import add_library_object
from pipecompile.tracing.guards.lifted_state import Holder
from pipecompile.tracing.guards.named_attributes import FOREIGN, WITH_TORCH, NamedAttributes, package_of
from pipecompile.tracing.guards.object_state import add_object
from pipecompile.tracing.guards.process_state import add_flags, add_result, returns_state
from pipecompile.tracing.guards.read_state import ABSENT, Place, ReadState, codes_in
from pipecompile.tracing.loaded_names import attribute_names, imported_modules, loaded_globals

__all__ = ["StateReader"]

_WHOLE = (
    SimpleNamespace,
    functools.partial,
    argparse.Namespace,
    UserDict,
    UserList,
    ChainMap,
    threading.local,
    threading.Event,
    queue.Queue,
)
_parts_of_function = attrgetter("__code__", "__defaults__", "__kwdefaults__")
_content_of_cell = attrgetter("cell_contents", "cell_contents")  # of a single name, attrgetter returns no tuple


class StateReader:
    """One walk. `written` has (container, key) of what the recorded graph itself writes: such a change is none.

    `lifted` are the labels of numbers that the graph reads at every run: only their types count.
    """

    def __init__(
        self, model: nn.Module, notes: AttributeReads, written: frozenset[tuple[int, Any]], lifted: Container[str] = ()
    ) -> None:
        self.lifted = lifted
        self.model, self.notes, self.written = model, notes, written
        self.written_containers = frozenset(container for container, _ in written)
        self.registered = frozenset(id(module) for module in model.modules())
        self.state = ReadState()
        self._known_reads: dict[str, Reads] | None = None
        self._pending: deque[tuple[Any, str, Place, Holder | None]] = deque()
        self._seen: dict[int, tuple[str, Any]] = {}
        self.named = NamedAttributes(self)
        self._codes: dict[int, CodeType] = {}
        self._ran = {source_of(code) for code, _ in notes.executed.values()}
        self._titles: dict[str, list[Any]] = {}
        self._named: set[tuple[int, str]] = set()

    def read(self, known: dict[str, Reads] | None = None) -> ReadState:
        """Return the state. `known` has the reads per label of an earlier walk, for objects that replaced others since."""
        self._known_reads = known
        self.state.reads = known or {}
        self.later(self.model, "model", "")
        kinds = ("hooks", "pre-hooks", "backward hooks", "backward pre-hooks")
        for table, kind in zip((*GLOBAL_FORWARD_HOOKS, *GLOBAL_BACKWARD_HOOKS), kinds, strict=True):
            self.state.add_row(users_hooks, table)
            self.later(users_hooks(table), f"{kind} of all modules", "")
        self._visit_all()
        self._add_executed()
        self._visit_all()
        return self.state

    def _visit_all(self) -> None:
        while self._pending:
            self._visit(*self._pending.popleft())
            if not self._pending:
                self.named.add_named()

    def later(self, value: Any, label: str, place: Place, holder: Holder | None = None) -> None:
        """Visit a value in its turn. `holder` is where it is found."""
        self._pending.append((value, label, place, holder))

    def is_lifted(self, label: str, value: Any) -> bool:
        """Return whether the recording reads the value at every run."""
        return label in self.lifted and type(value) in (int, float)

    def has_run(self, function: Any) -> bool:
        """Return whether the recording has run a function."""
        code = getattr(getattr(function, "__func__", function), "__code__", None)
        return code is not None and source_of(code) in self._ran

    def title(self, subject: Any, name: str) -> str:
        """Return a name for labels that no other subject has: functions of one factory all have the same."""
        known = self._titles.setdefault(name, [])
        if not any(subject is one for one in known):
            known.append(subject)
        place = next(place for place, one in enumerate(known) if one is subject)
        return f"{name} ({place + 1})" if place else name

    def reads_of(self, value: Any, label: str) -> Reads | None:
        """Return the names read on an object; None if its reads were not noted, so that any may have happened."""
        if self._known_reads is not None:
            return self._known_reads.get(label)
        reads = self.notes.reads_of(value) if self.notes.is_watched(value) else None
        if reads is not None:
            self.state.reads[label] = reads
        return reads

    # -- values -----------------------------------------------------------------------------------------------------

    def _visit(self, value: Any, label: str, place: Place, holder: Holder | None) -> None:
        add = self.state.add
        self.named.note_value(value, holder, place)
        if is_atom(value):
            add(label, type(value) if self.is_lifted(label, value) else value, place)
            if holder is not None and type(value) in (int, float):
                self.state.holders[label] = holder
        elif id(value) in self._seen:
            add(label, f"the same as {self._seen[id(value)][0]}", place)
        else:
            self._seen[id(value)] = label, value
            self._visit_once(value, label, place)

    def _visit_once(self, value: Any, label: str, place: Place) -> None:
        add = self.state.add
        if isinstance(value, torch.Tensor):
            add(label, value, place)
            self.state.tensors.append((label, value))
            self.named.note_tensor(value, label, place)
        elif isinstance(value, CONTAINERS):
            self._container(value, label, place)
        elif isinstance(value, (FunctionType, MethodType, staticmethod, classmethod, property, functools.partial)):
            self._callable(value, label, place)
        elif isinstance(value, ContextVar):
            self.state.add_row(_content_of_variable, value)
            self.later(value.get(ABSENT), f"{label}.get()", place)
        elif isinstance(value, (type, ModuleType)):
            add(label, value, place)
            self.named.note_scope(value, place)
        elif wrapped := getattr(type(value), "__wrapped__", None) or (_is_cache(value) and value.__wrapped__):
            add(label, value, place)
            self.later(wrapped, label, place)
        elif package_of(type(value)) in FOREIGN and not isinstance(value, _WHOLE):
            add_library_object(self, value, label, place)
        else:
            add(label, value if isinstance(value, nn.Module) else type(value), place)
            add_object(self, value, label, place)

    def _container(self, value: Any, label: str, place: Place) -> None:
        if id(value) in self.written_containers or value is sys.modules:
            return  # every import changes sys.modules; modules that the code names are read one by one
        add_container(self, value, label, place)
        if package_of(type(value)) not in WITH_TORCH and hasattr(value, "__dict__"):
            add_object(self, value, f"{label}, as an object", place)

    # -- functions --------------------------------------------------------------------------------------------------

    def _callable(self, value: Any, label: str, place: Place) -> None:
        if isinstance(value, FunctionType):
            self._function(value, label, place)
            return
        self.state.add(label, type(value), place)
        if isinstance(value, property):
            parts: Iterable[Any] = (value.fget,)
        elif isinstance(value, functools.partial):
            parts = (value.func, value.args, value.keywords)
        else:
            parts = (value.__func__, *([value.__self__] if isinstance(value, MethodType) else []))
        for part in parts:
            self.later(part, f"{label}, {_part_name(part)}", place)

    def _function(self, function: FunctionType, label: str, place: Place) -> None:
        """Note the code of a user function, and what it holds and loads. Of others, the function itself."""
        if package_of(function) in WITH_TORCH:
            self.state.add(label, function, place)
            if returns_state(function):
                add_result(self.state, function, label, place)
            return
        code = function.__code__
        self._codes |= {id(inner): inner for inner in codes_in(code)}
        self.state.add(label, code, place)
        self.state.add_row(_parts_of_function, function)
        name = self.title(function, code.co_qualname)
        self.later(function.__defaults__, f"defaults of {name}", place)
        self.later(function.__kwdefaults__, f"keyword defaults of {name}", place)
        for variable, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            if _is_full(cell) and (id(cell), "cell_contents") not in self.written:
                path = f"{variable} (variable around {name})"
                if not self.is_lifted(path, cell.cell_contents):
                    self.state.add_row(_content_of_cell, cell)
                self.later(cell.cell_contents, path, (code, variable), Holder(cell, "cell_contents"))
                if isinstance(cell.cell_contents, ModuleType):
                    self._add_module(cell.cell_contents, attribute_names(code), (code, variable))
        self.named.note_code(code)
        self.named.note_set(vars(function), name, place)
        self._add_globals(function, attribute_names(code))

    def _add_executed(self) -> None:
        """Note the code that ran and to which nothing has led so far, with the functions that have it."""
        left = {key: pair for key, pair in self.notes.executed.items() if key not in self._codes}
        without = self.notes.without_functions  # or each read would look through all of the memory for them
        for function in functions_of(ran for key, ran in left.items() if key not in without):
            self.later(function, f"{function.__qualname__}, which ran", "")
        self._visit_all()
        for key, (code, scope) in left.items():
            if key not in self._codes:  # code without a function
                without.add(key)
                self.named.note_code(code)
                self._add_globals(FunctionType(without_variables(code), scope), attribute_names(code))

    def _add_globals(self, function: FunctionType, names: frozenset[str]) -> None:
        code, scope = function.__code__, function.__globals__
        module = scope.get("__name__", "")
        loads = [name for name in loaded_globals(code) if name in scope and self.is_new(scope, name)]
        paths = {name: f"{name} (global of {module})" for name in loads}
        self.add_names(scope, paths)
        for name, path in paths.items():
            self.later(scope[name], path, (code, name), Holder(scope, name))
        for name in loaded_globals(code) & scope.keys():
            if isinstance(scope[name], ModuleType):
                self._add_module(scope[name], names, (code, name))
        for module in imported_modules(function):
            self._add_module(module, names, (code, module.__name__))

    def _add_module(self, module: ModuleType, names: frozenset[str], place: Place) -> None:
        """Note the attributes of a module that a function names; of a library's module, also of its submodules."""
        scope = vars(module)
        named = [name for name in names if name in scope and self.is_new(scope, name)]
        self.add_names(scope, {name: f"{module.__name__}.{name}" for name in named})
        for name in named:
            code = place[0] if isinstance(place, tuple) else place
            where: Place = (code, name) if not isinstance(code, str) else code
            self.later(scope[name], f"{module.__name__}.{name}", where, Holder(scope, name))
            if isinstance(scope[name], ModuleType):
                self._add_module(scope[name], names, place)
            else:
                add_flags(self.state, scope[name], names, f"{module.__name__}.{name}", where)
        add_flags(self.state, module, names, module.__name__, place)
        if "environ" in named or "getenv" in named:
            self.state.add_row(_variables, os.environ)
            self.state.add("the environment variables", *_variables(os.environ), place)

    def add_names(self, scope: Mapping[str, Any], paths: Mapping[str, str]) -> None:
        """Note the values of a mapping as a row, without those that are read at every run. `paths` has labels by name."""
        self.state.add_names(scope, [name for name, path in paths.items() if not self.is_lifted(path, scope[name])])

    def is_new(self, scope: Any, name: str) -> bool:
        key = id(scope), name
        is_new = key not in self._named and key not in self.written
        self._named.add(key)
        return is_new


def _content_of_variable(variable: ContextVar[Any]) -> tuple[Any]:
    """Return the value of a context variable in this context."""
    return (variable.get(ABSENT),)


def _variables(environment: Mapping[str, str]) -> tuple[frozenset[tuple[str, str]]]:
    """Return the variables of the environment as one value."""
    return (frozenset(environment.items()),)


def _is_cache(value: Any) -> bool:
    return isinstance(value, functools._lru_cache_wrapper)


def _part_name(part: Any) -> str:
    return str(getattr(part, "__qualname__", type(part).__name__))


def _is_full(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True
