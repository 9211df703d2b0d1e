"""Uses of objects by the Python that a node runs, pieces kept whole and hooks of layers: found by the names in their code.

self.scale = largest(x)         bound     scale        in the attributes of the model
seen.append(h)                  changed   seen         a list that the hook closes over
h * self.scale                  read      scale
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from types import FunctionType
from typing import Any

from torch import nn

from pipecompile.torch_private.modules import forward_hooks_of
from pipecompile.tracing.called_functions import CalledFunctions
from pipecompile.tracing.loaded_names import left_names
from pipecompile.tracing.opaque.opaque_module import OpaqueModule, runs_python
from pipecompile.tracing.reachable_code import has_content

__all__ = ["PythonUse", "python_use"]

_LISTS = (list, deque, set, dict)


@dataclass(eq=False)
class PythonUse:
    """The names and objects in the functions that a call of `module` runs. `owner` is the module of a piece kept whole."""

    module: nn.Module
    calls: CalledFunctions
    owner: nn.Module | None = None

    @property
    def functions(self) -> tuple[FunctionType, ...]:
        """The functions."""
        return self.calls.functions

    @cached_property
    def read(self) -> frozenset[str]:
        """The names of attributes, items and variables that it reads."""
        return frozenset[str]().union(*(left_names(one.__code__).read for one in self.functions))

    @cached_property
    def bound(self) -> frozenset[str]:
        """The names of attributes and items that it sets."""
        return frozenset[str]().union(*(left_names(one.__code__).bound for one in self.functions))

    @cached_property
    def changed(self) -> frozenset[str]:
        """The names of the containers that it changes by a method."""
        return frozenset[str]().union(*(left_names(one.__code__).changed for one in self.functions))

    @cached_property
    def dicts(self) -> dict[int, dict[Any, Any]]:
        """The attributes of objects, and the dicts, by id."""
        return {id(one): one for one in self.calls.containers if isinstance(one, dict)}

    def lists(self, name: str) -> dict[int, Any]:
        """Return the containers that an attribute, an item or a variable of this name is, by id."""
        values = [held[name] for held in self.dicts.values() if name in held]
        values += [value for one in self.functions for value in _variables(one, name)]
        return {id(value): value for value in values if isinstance(value, _LISTS)}

    def shares_object(self, writer: PythonUse, name: str) -> bool:
        """Return whether both reach an object with this attribute, or one that the writer may give it: its own module."""
        common = self.dicts.keys() & writer.dicts.keys()
        own = None if writer.owner is None else id(vars(writer.owner))
        return own in common or any(name in self.dicts[key] for key in common)

    def shares_list(self, writer: PythonUse, name: str) -> bool:
        """Return whether a name is the same container for both."""
        return not self.lists(name).keys().isdisjoint(writer.lists(name))


def python_use(called: nn.Module) -> PythonUse | None:
    """Return the Python of the user that a call of this module runs; None if it runs none."""
    if not runs_python(called):
        return None
    owner = called.owner[0] if isinstance(called, OpaqueModule) else None
    calls = CalledFunctions(_begins(called) if isinstance(called, OpaqueModule) else _hooks(called), owner)
    return PythonUse(called, calls, owner)


def _hooks(module: nn.Module) -> list[Any]:
    return [hook for table in forward_hooks_of(module) for hook in table.values()]


def _variables(function: FunctionType, name: str) -> Iterator[Any]:
    """Yield what a function closes over or finds in its globals under a name."""
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=False)
    yield from (cell.cell_contents for variable, cell in cells if variable == name and has_content(cell))
    yield function.__globals__.get(name)


def _begins(called: OpaqueModule) -> list[Any]:
    """Return what the call of a piece runs first: a method, a block, a plain function; of a module the forwards and hooks inside."""
    owner, piece = called.owner[0], called.piece
    if piece.is_module:
        return [one for module in owner.modules() for one in (module.forward, *_hooks(module))]
    function = called.function or getattr(owner, piece.method)
    return [getattr(function, "function", function)]  # of a block
