"""Layers that would do something else on slices of a sequence than on the whole, although they compute position by position.

forward hook, pre-hook           run once per slice: what they note has an entry per slice
backward hook, pre-hook          get the gradient of a slice: its norm is not that of the whole
Embedding(scale_grad_by_freq)    divides by how often a token is in a slice, not in the micro-batch
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

from torch import fx, nn

from pipecompile.graph.row_order import word_of
from pipecompile.torch_private.modules import GLOBAL_BACKWARD_HOOKS, GLOBAL_FORWARD_HOOKS, hook_tables_of, users_hooks

__all__ = ["fault_on_slices"]

_BY_FREQUENCY = "scale_grad_by_freq"
_PLACE = 5
"""Place of `scale_grad_by_freq` among the arguments of `F.embedding`."""


def fault_on_slices(node: fx.Node, layer: nn.Module | None) -> str:
    """Return why a call, of a `layer` if it is one, is another one on slices; "" if it is the same. Settings and hooks are those of now."""
    if layer is None:
        is_scaled = word_of(node) == "embedding" and _is_set(node)
    else:
        is_scaled = any(getattr(one, _BY_FREQUENCY, False) for one in layer.modules())
        if hook := next(_hooks(layer), None):
            name = getattr(hook, "__qualname__", type(hook).__qualname__)
            return f"its hook {name} would run once per slice, on the values of the slice"
    return f"{_BY_FREQUENCY}=True counts tokens, which each slice has fewer of" if is_scaled else ""


def _is_set(node: fx.Node) -> bool:
    return bool(node.kwargs.get(_BY_FREQUENCY, node.args[_PLACE] if len(node.args) > _PLACE else False))


def _hooks(layer: nn.Module) -> Iterator[Any]:
    """Return the hooks of a layer and of all modules, but torch's own."""
    own = (table for one in layer.modules() for table in hook_tables_of(one))
    tables = filter(None, chain(own, GLOBAL_FORWARD_HOOKS, GLOBAL_BACKWARD_HOOKS))  # every step asks: most are empty
    return chain.from_iterable(map(users_hooks, tables))
