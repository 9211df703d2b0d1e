"""What every module looked like when the recording began: a node that calls a module finds it like that again.

functional_call(layer, weights, x)          forward itself exchanges weights, sets attributes, registers hooks
self.pool.kernel_size = x.shape[-2:]        or changes a mode: such a module cannot be called as a whole,
self.norm.eval()                            it is recorded through as it is at that moment
"""

from __future__ import annotations

from typing import Any

from torch import nn

from pipecompile.torch_private.modules import HOOK_TABLES, STATE_TABLES

__all__ = ["Originals"]

_TABLES = (*STATE_TABLES, *HOOK_TABLES)
_PLAIN = (int, float, bool, str, type(None))


class Originals:
    """Made when the twins are in their places."""

    def __init__(self, model: nn.Module) -> None:
        self._looks = {id(module): _look(module) for module in model.modules()}

    def kept(self, module: nn.Module) -> bool:
        """Do the module and all inside it still look as they did?"""
        return all(_same(_look(inner), self._looks.get(id(inner), {})) for inner in module.modules())

    def renew(self, module: nn.Module) -> None:
        """What a call of the module changes of it, the node of that call changes as well."""
        for inner in module.modules():
            self._looks[id(inner)] = _look(inner)


def _look(module: nn.Module) -> dict[Any, Any]:
    look: dict[Any, Any] = dict(vars(module))
    for name in _TABLES:
        look.update({(name, key): value for key, value in (look.pop(name, None) or {}).items()})
    return look


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
