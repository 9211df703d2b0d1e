"""Attributes that a piece kept whole leaves on its module, and that code around the piece reads: they are results of its call.

    class Experts:  forward sets self.balance        kept whole: its Python runs
    class Model:    total = total + layer.balance    recorded: reads what the call returned beside its result

An attribute counts if a call has put another value with tensors there, and if code outside of the module names it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from threading import RLock
from types import FunctionType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from pipecompile.batching.containers import argument_leaves
from pipecompile.tracing.loaded_names import attribute_names
from pipecompile.tracing.reachable_code import reachable

__all__ = ["NOTHING_LEFT", "AttributeWatch", "LeftAttributes"]

_MISSING: Any = object()

_LOCKS: WeakKeyDictionary[nn.Module, RLock] = WeakKeyDictionary()
"""Of modules that leave attributes."""


@dataclass(frozen=True, slots=True)
class LeftAttributes:
    """The attributes that one call leaves: (path of the module within the piece's, name) of each."""

    names: tuple[tuple[str, str], ...] = ()

    def of_run(self, owner: nn.Module, run: Callable[[], Any]) -> Any:
        """Call a module and return as `joined` does. Threads that call the same one take turns: each gets what its own call left."""
        if not self.names:
            return run()
        with _LOCKS.setdefault(owner, RLock()):
            return self.joined(owner, run())

    def joined(self, owner: nn.Module, result: Any) -> Any:
        """Return the result of a call together with what it has left; the result alone if it left nothing."""
        if not self.names:
            return result
        return result, [vars(owner.get_submodule(path)).get(name) for path, name in self.names]

    def separated(self, owner: nn.Module, joined: Any) -> Any:
        """Put into the attributes what a call has left, and return its result."""
        if not self.names:
            return joined
        result, values = joined
        for (path, name), value in zip(self.names, values, strict=True):
            setattr(owner.get_submodule(path), name, value)
        return result


NOTHING_LEFT = LeftAttributes()


class AttributeWatch:
    """The values that attributes of a module had when this was made, as far as code of the model outside of the module names them."""

    def __init__(self, model: nn.Module, owner: nn.Module) -> None:
        classes = {cls for module in owner.modules() for cls in type(module).__mro__}
        inside = {value for cls in classes for value in vars(cls).values() if isinstance(value, FunctionType)}
        outside = (one for one in reachable(model).functions if one not in inside)
        self._named = frozenset[str]().union(*(attribute_names(one.__code__) for one in outside))
        self._owner = owner
        self._before = dict(self._values())

    def _values(self) -> Iterable[tuple[tuple[str, str], Any]]:
        for path, module in self._owner.named_modules():
            own = vars(module)
            yield from (((path, name), own[name]) for name in sorted(self._named & own.keys()))

    def left(self) -> LeftAttributes:
        """Return the attributes that have other values now, with tensors."""
        changed = [(key, value) for key, value in self._values() if self._before.get(key, _MISSING) is not value]
        return LeftAttributes(tuple(key for key, value in changed if _has_tensor(value)))


def _has_tensor(value: Any) -> bool:
    return any(isinstance(leaf, torch.Tensor) for leaf in argument_leaves(value))
