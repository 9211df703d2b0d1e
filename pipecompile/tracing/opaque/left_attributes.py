"""Attributes that a piece kept whole sets on its module, and that code around the piece reads: they are results of its call.

    class Experts:  forward sets self.balance        kept whole: its Python runs
    class Model:    total = total + layer.balance    recorded: reads what the call returned beside its result

An attribute counts if a call has put another value with tensors there, and if code outside of the module names it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from operator import itemgetter
from threading import RLock
from types import FunctionType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from pipecompile.batching.containers import argument_leaves
from pipecompile.tracing.loaded_names import attribute_names
from pipecompile.tracing.reachable_code import reachable

__all__ = ["NOTHING_LEFT", "AttributeWatch", "LeftAttributes", "OutsideNames", "turns_of"]

_MISSING: Any = object()

_LOCKS: WeakKeyDictionary[nn.Module, RLock] = WeakKeyDictionary()


def turns_of(owner: nn.Module) -> RLock:
    """Return the lock of a module that leaves attributes. Its calls take turns, and so do nodes that write these attributes."""
    return _LOCKS.setdefault(owner, RLock())


@dataclass(frozen=True, slots=True)
class LeftAttributes:
    """The attributes that one call leaves: (path of the module within the piece's, name) of each."""

    names: tuple[tuple[str, str], ...] = ()

    def of_run(self, owner: nn.Module, run: Callable[[], Any]) -> Any:
        """Call a module and return as `joined` does. Threads take turns: each gets what its own call left."""
        if not self.names:
            return run()
        with turns_of(owner):
            return self.joined(owner, run())

    def joined(self, owner: nn.Module, result: Any) -> Any:
        """Return the result of a call, together with the attributes that it has set, if any."""
        if not self.names:
            return result
        return result, [vars(owner.get_submodule(path)).get(name) for path, name in self.names]

    def separated(self, owner: nn.Module, joined: Any) -> Any:
        """Set the attributes that a call has set, and return its result."""
        if not self.names:
            return joined
        result, values = joined
        for (path, name), value in zip(self.names, values, strict=True):
            setattr(owner.get_submodule(path), name, value)
        return result


NOTHING_LEFT = LeftAttributes()


class OutsideNames:
    """The attributes that code of a model names outside of a module. Construct this while no method of the model is replaced."""

    def __init__(self, model: nn.Module) -> None:
        code = reachable(model)
        self._names: dict[FunctionType, frozenset[str]] = code.once(
            "attribute names", lambda: {one: attribute_names(one.__code__) for one in code.functions}
        )

    def among(self, names: AbstractSet[str], owner: nn.Module) -> set[str]:
        """Return the names that also occur in code outside of a module."""
        classes = {cls for module in owner.modules() for cls in type(module).__mro__}
        inside = {value for cls in classes for value in vars(cls).values() if isinstance(value, FunctionType)}
        return set[str]().union(*(names & named for function, named in self._names.items() if function not in inside))


class AttributeWatch:
    """The values that attributes of a module had when this was made."""

    def __init__(self, owner: nn.Module, outside: OutsideNames) -> None:
        self._owner, self._outside = owner, outside
        self._before = dict(self._values())

    def _values(self) -> Iterator[tuple[tuple[str, str], Any]]:
        for path, module in self._owner.named_modules():
            yield from (((path, name), value) for name, value in sorted(vars(module).items(), key=itemgetter(0)))

    def left(self) -> LeftAttributes:
        """Return the attributes that have other values now, with tensors, and that code outside of the module names."""
        changed = [(key, value) for key, value in self._values() if self._before.get(key, _MISSING) is not value]
        left = [key for key, value in changed if _has_tensor(value)]
        named = self._outside.among({name for _, name in left}, self._owner) if left else set()
        return LeftAttributes(tuple(key for key in left if key[1] in named))


def _has_tensor(value: Any) -> bool:
    return any(isinstance(leaf, torch.Tensor) for leaf in argument_leaves(value))
