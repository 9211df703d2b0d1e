"""The model is left exactly as it was found: attributes and what they contain, children, modes and random states."""

from __future__ import annotations

import random
import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

__all__ = ["tensors_of", "untouched"]

_CONTAINERS = (dict, OrderedDict, defaultdict, list, set, deque)
_FOREIGN = frozenset(sys.stdlib_module_names) | {"torch", "numpy"}
"""Objects of these packages are not looked into: they are no place where a model keeps its caches."""


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Restore every module, all that it holds, and the random number generators when the block ends, however it ends.

    Containers and plain objects inside a module get their content back; tensors are restored by identity, and their
    *values* are safe because the block computes on fake tensors only.
    """
    kept = [(container, _content(container)) for container in _containers(model)]
    torch_state, python_state = torch.get_rng_state(), random.getstate()
    numpy_random = getattr(sys.modules.get("numpy"), "random", None)
    numpy_state = numpy_random.get_state() if numpy_random else None
    try:
        yield
    finally:
        torch.set_rng_state(torch_state)
        random.setstate(python_state)
        if numpy_random:
            numpy_random.set_state(numpy_state)
        for container, content in kept:
            _restore(container, content)


def tensors_of(model: nn.Module) -> list[torch.Tensor]:
    """Every tensor that the model holds, in a table or anywhere else, each once."""
    held = [item for container in _containers(model) for item in _items(container) if isinstance(item, torch.Tensor)]
    return list({id(tensor): tensor for tensor in held}.values())


def _containers(model: nn.Module) -> list[Any]:
    """Every container reachable from the model, each once."""
    found: dict[int, Any] = {}
    waiting: list[Any] = [model]
    while waiting:
        holder = waiting.pop()
        if not isinstance(holder, _CONTAINERS):
            holder = vars(holder)
        if id(holder) not in found:
            found[id(holder)] = holder
            waiting += [item for item in _items(holder) if _can_hold(item)]
    return list(found.values())


def _items(container: Any) -> Iterable[Any]:
    return container.values() if isinstance(container, dict) else container


def _can_hold(value: object) -> bool:
    if isinstance(value, nn.Module) or type(value) in _CONTAINERS:
        return True
    if isinstance(value, (type, torch.Tensor)) or not hasattr(value, "__dict__"):
        return False
    return type(value).__module__.partition(".")[0] not in _FOREIGN


def _content(container: Any) -> list[Any]:
    return list(container.items() if isinstance(container, dict) else container)


def _restore(container: Any, content: list[Any]) -> None:
    if _same(_content(container), content, isinstance(container, dict)):
        return
    container.clear()
    container.update(content) if isinstance(container, (dict, set)) else container.extend(content)


def _same(now: list[Any], then: list[Any], pairs: bool) -> bool:
    if len(now) != len(then):
        return False
    if pairs:
        return all(a[0] is b[0] and a[1] is b[1] for a, b in zip(now, then, strict=True))
    return all(a is b for a, b in zip(now, then, strict=True))
