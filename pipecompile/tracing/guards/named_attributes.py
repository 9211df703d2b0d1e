"""Attributes that count because the code of a function names them, or because Python itself calls them.

of a class       what the functions name, and special methods that ran: `x * h` and `x[0]` name neither `__mul__` nor `__getitem__`
of a tensor      what was set on it, as `weight.scale = 2.0`, under a name or text that the functions have
of a function    the same: `forward.calls`
of a module      what the functions name, whatever refers to the module: `self.settings.scale`; of torch's, if an object holds it
"""

from __future__ import annotations

import enum
import sys
from collections.abc import Mapping
from types import CodeType, FunctionType, ModuleType
from typing import Any, Protocol

import torch

from pipecompile.tracing.fakes.fake_tensors import user_attributes
from pipecompile.tracing.guards.lifted_state import Holder
from pipecompile.tracing.guards.object_state import class_attribute
from pipecompile.tracing.guards.read_state import Place, ReadState
from pipecompile.tracing.loaded_names import attribute_names

__all__ = ["FOREIGN", "NamedAttributes", "WITH_TORCH", "package_of"]

FOREIGN = frozenset(sys.stdlib_module_names) | {"sympy", "numpy", "pipecompile"}
"""Packages whose objects a walk does not enter."""

WITH_TORCH = FOREIGN | {"torch"}
"""Packages whose functions and classes hold no state of the user's."""


_PATCHED = ("numpy", "torch")
"""Packages whose functions a user may replace."""


class NamingWalk(Protocol):
    """The walk along the state, as far as named attributes need it."""

    state: ReadState

    def later(self, value: Any, label: str, place: Place, holder: Holder | None = None) -> None:
        """Visit a value in its turn. `holder` is where it is found."""

    def add_names(self, scope: Mapping[str, Any], paths: Mapping[str, str]) -> None:
        """Note the values of a mapping. `paths` has labels by name."""

    def is_new(self, scope: Any, name: str) -> bool:
        """Return whether a name of a scope is met for the first time."""

    def has_run(self, function: Any) -> bool:
        """Return whether the recording has run a function."""

    def title(self, subject: Any, name: str) -> str:
        """Return the name of a subject in labels, which no other subject has."""


class NamedAttributes:
    """The classes and tensors that a walk has met, and the names in the code that it has met."""

    def __init__(self, walk: NamingWalk) -> None:
        self._walk = walk
        self._names: set[str] = set()
        self._classes: dict[type, Place] = {}
        self._special: dict[type, frozenset[str]] = {}
        self._set: dict[int, tuple[dict[str, Any], str, Place]] = {}

    def note_code(self, code: CodeType) -> None:
        """Note the names that the code of a function has."""
        self._names |= attribute_names(code)

    def note_tensor(self, tensor: torch.Tensor, label: str, place: Place) -> None:
        """Note a tensor if anything was set on it."""
        self.note_set(user_attributes(tensor), label, place)

    def note_set(self, own: dict[str, Any], label: str, place: Place) -> None:
        """Note the attributes that were set on a tensor, function or module."""
        if own:
            self._set[id(own)] = own, label, place

    def note_scope(self, scope: type | ModuleType, place: Place) -> None:
        """Note a class or a user module."""
        if isinstance(scope, type):
            self.note_class(scope, place)
        elif scope.__name__.partition(".")[0] not in WITH_TORCH:
            self.note_set(vars(scope), scope.__name__, place)

    def note_value(self, value: Any, holder: Holder | None, place: Place) -> None:
        """Note a text, which may be a name (`getattr(ops, self.kind)`), and a module of torch or numpy that an object or a container
        holds (`self.F = torch.nn.functional`).
        """
        if isinstance(value, str) and value.isidentifier():
            self._names.add(value)
        elif isinstance(value, ModuleType) and value.__name__.partition(".")[0] in _PATCHED and not _is_of_code(holder):
            self.note_set(vars(value), value.__name__, place)

    def note_class(self, cls: type, place: Place) -> None:
        """Note a user class and its bases."""
        for base in cls.__mro__:
            if is_users_class(base) and base not in self._classes:
                self._walk.state.add_row(_bases, base)
                self._walk.state.add(f"bases of {self._walk.title(base, base.__qualname__)}", base.__bases__, place)
                self._classes[base], self._special[base] = place, _special_methods(base)
                self._walk.state.sized.append(vars(base))
                names = ", ".join(sorted(self._special[base]))
                self._walk.state.add(f"special methods of {self._walk.title(base, base.__qualname__)}", names, place)

    def add(self, cls: type, name: str, place: Place) -> None:
        """Note the value of an attribute of a class."""
        if self._walk.is_new(cls, name):
            path = f"{self._walk.title(cls, cls.__qualname__)}.{name}"
            self._walk.add_names(vars(cls), {name: path})
            self._walk.later(vars(cls)[name], path, place, Holder(cls, name))

    def add_named(self) -> None:
        """Note all attributes that code names, or Python calls, as far as the walk has come."""
        for own, label, place in list(self._set.values()):
            paths = {name: f"{label}.{name}" for name in self._names & own.keys() if self._walk.is_new(own, name)}
            self._walk.add_names(own, paths)
            for name, path in paths.items():
                self._walk.later(own[name], path, place, Holder(own, name))
        for cls, place in list(self._classes.items()):
            for name in (self._names & vars(cls).keys()) | self._special[cls]:
                is_unused = name in self._special[cls] and not self._walk.has_run(vars(cls)[name])
                if not is_unused and class_attribute(cls, name) is not None:
                    self.add(cls, name, place)


def _is_of_code(holder: Holder | None) -> bool:
    """Return whether a value is a global or a variable of a function, whose code names what it takes from it."""
    if holder is None or holder.key == "cell_contents":
        return holder is not None
    return isinstance(holder.container, dict) and "__builtins__" in holder.container


def _bases(cls: type) -> tuple[type, ...]:
    return cls.__bases__


def _special_methods(cls: type) -> frozenset[str]:
    """Return the names of the methods of a class that Python calls by itself; `__getattribute__` is one of the recording itself."""
    kinds = (FunctionType, classmethod, staticmethod)
    found = [name for name, value in vars(cls).items() if isinstance(value, kinds) and name[:2] == name[-2:] == "__"]
    return frozenset(found) - {"__getattribute__"}


def is_users_class(cls: type) -> bool:
    """Return whether a class may be the user's own: not of Python, torch or this package, and no enumeration."""
    return package_of(cls) not in WITH_TORCH and not issubclass(cls, enum.Enum)


def package_of(value: Any) -> str:
    """Return the name of the package of a class or function."""
    return str(getattr(value, "__module__", "")).partition(".")[0]
