"""Snapshots of modules: whether a module still is what it was when the recording began.

A node that calls a module runs it as it is at run time. A module that `forward` itself has changed since the beginning
cannot be called as a whole; it is recorded through, as it is at that moment:

functional_call(layer, weights, x)          weights, attributes or hooks exchanged
self.pool.kernel_size = x.shape[-2:]        an attribute set
self.norm.eval()                            a mode switched
"""

from __future__ import annotations

from typing import Any

from torch import nn

from pipecompile.torch_private.modules import HOOK_TABLES, STATE_TABLES

__all__ = ["ModuleSnapshots"]

_TABLES = (*STATE_TABLES, *HOOK_TABLES)
_PLAIN = (int, float, bool, str, type(None))


class ModuleSnapshots:
    """The attributes and tables of all modules. Construct it when the fake twins are in the model's tables."""

    def __init__(self, model: nn.Module) -> None:
        self._snapshots = {id(module): _attributes(module) for module in model.modules()}

    def is_unchanged(self, module: nn.Module) -> bool:
        """Return whether the module and all modules inside it are as in the snapshot."""
        return all(_same(_attributes(inner), self._snapshots.get(id(inner), {})) for inner in module.modules())

    def update(self, module: nn.Module) -> None:
        """Take a new snapshot of the module after its call: what the call changed, its node will change too."""
        for inner in module.modules():
            self._snapshots[id(inner)] = _attributes(inner)


def _attributes(module: nn.Module) -> dict[Any, Any]:
    attributes: dict[Any, Any] = dict(vars(module))
    for name in _TABLES:
        attributes.update({(name, key): value for key, value in (attributes.pop(name, None) or {}).items()})
    return attributes


def _same(now: dict[Any, Any], then: dict[Any, Any]) -> bool:
    return now.keys() == then.keys() and all(_equal(value, then[key]) for key, value in now.items())


def _equal(now: Any, then: Any) -> bool:
    if now is then:
        return True
    if type(now) is not type(then):
        return False
    if isinstance(now, (tuple, list)):
        return len(now) == len(then) and all(map(_equal, now, then))
    return type(now) in _PLAIN and now == then
