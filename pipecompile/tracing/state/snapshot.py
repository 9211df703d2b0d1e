"""The model is left exactly as it was found: attributes and what they contain, children, modes and random states.

What its hooks close over, and the lists and dicts that these name, count as the model's.
"""

from __future__ import annotations

import random
import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from pipecompile.torch_private.modules import GLOBAL_FORWARD_HOOKS, backward_hooks_of, forward_hooks_of
from pipecompile.tracing.reachable_code import names_in

__all__ = ["Place", "can_hold", "content_of", "kept_content", "places_of", "tensors_of", "untouched"]

_CONTAINERS = (dict, OrderedDict, defaultdict, list, set, deque, CellType)
_FOREIGN = frozenset(sys.stdlib_module_names) | {"torch", "numpy"}
"""Objects of these packages are not looked into: they are no place where a model keeps its caches."""


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Restore every module, all that it holds, and the random number generators when the block ends, however it ends.

    Containers and plain objects inside a module get their content back; tensors are restored by identity, and their
    *values* are safe because the block computes on fake tensors only.
    """
    torch_state, python_state = torch.get_rng_state(), random.getstate()
    numpy_random = getattr(sys.modules.get("numpy"), "random", None)
    numpy_state = numpy_random.get_state() if numpy_random else None
    with kept_content(places_of(model)):
        try:
            yield
        finally:
            torch.set_rng_state(torch_state)
            random.setstate(python_state)
            if numpy_random:
                numpy_random.set_state(numpy_state)


@contextmanager
def kept_content(places: Iterable[Place]) -> Iterator[None]:
    """Restore what these places contain when the block ends."""
    kept = [(place.container, content_of(place.container)) for place in places]
    try:
        yield
    finally:
        for container, content in kept:
            _restore(container, content)


def tensors_of(model: nn.Module) -> list[torch.Tensor]:
    """Every tensor that the model holds, in a table or anywhere else, each once."""
    held = [item for place in places_of(model) for item in _items(place.container) if isinstance(item, torch.Tensor)]
    return list({id(tensor): tensor for tensor in held}.values())


@dataclass(frozen=True, slots=True)
class Place:
    """A container: the attributes of an object, a list, what a function closes over. `owner` is the path of the module that
    holds it, `name` where in there it is.
    """

    container: Any
    owner: str
    name: str = ""


def places_of(*roots: Any) -> list[Place]:
    """Every container reachable from the roots, each once; for a model with the hooks of all modules."""
    found: dict[int, Place] = {}
    paths: dict[int, str] = {}
    followed = {id(root) for root in roots}
    waiting = [(root, "", "") for root in roots]
    for root in roots:
        if isinstance(root, nn.Module):
            paths |= {id(module): path for path, module in root.named_modules()}
            waiting += [(table, "", "") for table in GLOBAL_FORWARD_HOOKS]
            followed |= {id(hook) for module in root.modules() for hook in _hooks(module)}
    while waiting:
        holder, owner, name = waiting.pop()
        owner, name = (paths[id(holder)], "") if id(holder) in paths else (owner, name)
        if isinstance(holder, (FunctionType, MethodType, partial)):
            if id(holder) not in followed:
                continue
            followed |= {id(thing) for thing in _closed_over(holder)}
            waiting += [(thing, owner, name) for thing in _closed_over(holder)]
            found |= {id(thing): Place(thing, owner) for thing in _named(holder)}
            continue
        container = holder if isinstance(holder, _CONTAINERS) else getattr(holder, "__dict__", {})
        if id(container) not in found:
            found[id(container)] = Place(container, owner, name)
            named = _labelled(container, name)
            waiting += [(item, owner, label) for label, item in named if can_hold(item)]
    return list(found.values())


def _hooks(module: nn.Module) -> Iterator[Any]:
    for table in (*forward_hooks_of(module), *backward_hooks_of(module)):
        yield from table.values()
    for table in GLOBAL_FORWARD_HOOKS:
        yield from table.values()


def _closed_over(function: Any) -> Iterator[Any]:
    """The variables of a function around, its object, and the arguments that it is given in advance."""
    if isinstance(function, FunctionType):
        yield from () if _foreign(function) else function.__closure__ or ()
    else:
        parts = (
            (function.__func__, function.__self__)
            if isinstance(function, MethodType)
            else (function.func, *function.args)
        )
        yield from (part for part in parts if can_hold(part))


def _named(function: Any) -> Iterator[Any]:
    """The lists and dicts that a function of the user's names; what is in them is not looked into."""
    if isinstance(function, FunctionType) and not _foreign(function):
        for name in names_in(function.__code__) & function.__globals__.keys():
            if type(value := function.__globals__[name]) in _CONTAINERS:
                yield value


def _labelled(container: Any, name: str) -> Iterable[tuple[str, Any]]:
    """The items of a container, each with its name."""
    if isinstance(container, dict):
        return [(f"{name}.{key}".lstrip("."), item) for key, item in container.items()]
    return [(name, item) for item in _items(container)]


def _items(container: Any) -> Iterable[Any]:
    if isinstance(container, CellType):
        return [value for _, value in content_of(container)]
    return list(container.values()) if isinstance(container, dict) else container


def _foreign(thing: Any) -> bool:
    return str(getattr(thing, "__module__", "")).partition(".")[0] in _FOREIGN


def can_hold(value: object) -> bool:
    """Is that a thing of the user's that may have other things in it?"""
    if isinstance(value, (nn.Module, FunctionType, MethodType, partial)) or type(value) in _CONTAINERS:
        return True
    if isinstance(value, (type, torch.Tensor)) or not hasattr(value, "__dict__"):
        return False
    return type(value).__module__.partition(".")[0] not in _FOREIGN


def content_of(container: Any) -> list[Any]:
    """What a container holds now: pairs of key and value for attributes, dicts and variables, else the items."""
    if isinstance(container, CellType):
        try:
            return [("cell_contents", container.cell_contents)]
        except ValueError:  # not assigned yet
            return []
    return list(container.items() if isinstance(container, dict) else container)


def _restore(container: Any, content: list[Any]) -> None:
    if _same(content_of(container), content, isinstance(container, (dict, CellType))):
        return
    if isinstance(container, CellType):
        container.cell_contents = content[0][1] if content else None
        return
    container.clear()
    container.update(content) if isinstance(container, (dict, set)) else container.extend(content)


def _same(now: list[Any], then: list[Any], pairs: bool) -> bool:
    if len(now) != len(then):
        return False
    if pairs:
        return all(a[0] is b[0] and a[1] is b[1] for a, b in zip(now, then, strict=True))
    return all(a is b for a, b in zip(now, then, strict=True))
