"""Snapshots of a model, restored after a recording: attributes, containers, children, modes, random states.

The model's containers are those reachable from its modules: attributes, lists, dicts, objects of user classes, what
hooks close over, and the global lists and dicts that hooks name.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import CellType, FunctionType, MethodType, NoneType
from typing import Any

import torch
from torch import nn

from pipecompile.torch_private.modules import GLOBAL_FORWARD_HOOKS, backward_hooks_of, forward_hooks_of
from pipecompile.tracing.container_items import attributes_in, items_in, refill, size_of, values_in
from pipecompile.tracing.fakes.lifted_numbers import LiftedNumber
from pipecompile.tracing.loaded_names import names_in
from pipecompile.tracing.reachable_code import reachable
from pipecompile.tracing.state.hidden_containers import (
    Slots,
    array_content,
    has_numbers,
    hidden_container,
    identity,
    is_array,
    set_array,
)
from pipecompile.tracing.state.random_states import (
    RandomStates,
    generators_among,
    random_sources,
    random_states_restored,
)
from pipecompile.tracing.state.shared_objects import is_shared

__all__ = [
    "Place",
    "can_hold",
    "content_of",
    "contents_restored",
    "has_content",
    "held_values",
    "holds_hidden",
    "model_restored",
    "places_of",
    "set_content",
    "tensors_of",
]

_CONTAINERS = (dict, list, set, deque, CellType)
_PLAIN = frozenset(
    (NoneType, bool, int, float, complex, str, bytes, torch.Tensor, nn.Parameter, torch.dtype, torch.device)
)
"""Types whose values hold no others: most of what is in a model."""
_SIZED = (dict, list, set, deque, tuple, frozenset)
_FOREIGN = (frozenset(sys.stdlib_module_names) - {"argparse", "collections", "types"}) | {"torch", "numpy"}
"""Packages whose objects are not searched: a model does not store its caches in them, but in a Namespace or a UserDict."""

_WITHOUT_SLOTS = _FOREIGN | {"pipecompile"}
"""Packages whose objects with slots are not searched. Ours lead from a recorded graph to all that the recording read."""


@contextmanager
def model_restored(model: nn.Module, places: Sequence[Place] | None = None) -> Iterator[RandomStates]:
    """Restore every module, everything reachable from it, and the random states of the CPU when the block ends, error or not.

    Tensors are restored by identity. Their contents are safe because the block computes on fake tensors; for a block that
    computes on real ones see `tensor_contents`. The states of the generators at the beginning are yielded. `places` are those of the
    model, deep, if the caller has just searched for them.
    """
    places = places_of(model, deep=True) if places is None else places
    generators = generators_among((*held_values(places), *reachable(model).objects))
    with random_states_restored(random_sources(generators)) as states, contents_restored(places):
        yield states


@contextmanager
def contents_restored(places: Iterable[Place]) -> Iterator[list[Any]]:
    """Restore the contents of these containers when the block ends. After it, the list has those that had changed."""
    contents = [(place.container, content_of(place.container)) for place in places]
    changed: list[Any] = []
    try:
        yield changed
    finally:
        for container, content in contents:
            if set_content(container, content):
                changed.append(container)


def tensors_of(*roots: Any, most: int | None = None, places: Sequence[Place] | None = None) -> list[torch.Tensor]:
    """Return every tensor reachable from a model or other objects, in a table or anywhere else, each once. For `most` see `places_of`; of a
    module that is reached, all parameters and buffers are returned, also those of scripted modules, whose tables are in TorchScript.
    `places` are the containers of the roots, deep, if the caller has just searched for them.
    """
    tensors, searched = dict[int, torch.Tensor](), set[int]()
    places = places_of(*roots, most=most, deep=True) if places is None else places
    for item in (*roots, *held_values(places)):
        if isinstance(item, torch.Tensor):
            tensors[id(item)] = item
        elif isinstance(item, nn.Module) and id(item) not in searched:
            searched |= {id(module) for module in item.modules()}
            tensors |= {id(tensor): tensor for tensor in (*item.parameters(), *item.buffers())}
    return list(tensors.values())


def held_values(places: Iterable[Place]) -> Iterator[Any]:
    """Yield every value in these containers."""
    for place in places:
        yield from _items(place.container)


@dataclass(frozen=True, slots=True)
class Place:
    """A container: the attributes of an object, a list, a variable that a function closes over.

    `owner` is the path of the module that holds it, `name` the container's path inside the module.
    """

    container: Any
    owner: str
    name: str = ""


def places_of(*roots: Any, most: int | None = None, deep: bool = False) -> list[Place]:
    """Return every container reachable from the roots, each once; of a model, also from the hooks of all modules.

    Functions are followed only if they are roots or hooks. An object that other threads may change is left out, unless it is a root.
    With `most`, return at most `most` containers, the nearest first, and none with more than `most` items. With `deep`, return also what is in
    tuples, slots and closures of functions that are attributes, and arrays: to restore it, for no node can write there.
    """
    places, named, paths = dict[int, Place](), dict[int, Place](), dict[int, str]()
    followed = set(root_ids := {id(root) for root in roots})
    pending = [(root, "", "") for root in roots]
    for root in roots:
        if isinstance(root, nn.Module):
            paths |= {id(module): path for path, module in root.named_modules()}
            pending += [(table, "", "") for table in GLOBAL_FORWARD_HOOKS]
            followed |= {id(hook) for module in root.modules() for hook in _hooks(module)}
    while pending and (most is None or len(places) < most):
        holder, owner, name = pending.pop(-1 if most is None else 0)
        owner, name = (paths[id(holder)], "") if id(holder) in paths else (owner, name)
        if isinstance(holder, (FunctionType, MethodType, partial)):
            if id(holder) in followed:
                followed |= {id(item) for item in _closed_over(holder)}
                pending += [(item, owner, name) for item in _closed_over(holder)]
                named |= {id(item): Place(item, owner) for item in _named(holder)}
            continue
        container = _container(holder, is_root=id(holder) in root_ids, deep=deep)
        key = identity(container)
        if key not in places and (most is None or not isinstance(container, _SIZED) or size_of(container) <= most):
            places[key] = Place(container, owner, name)
            labelled = _labelled(container, name)
            followed |= _own_functions(holder, labelled) if deep else set()
            pending += [(item, owner, label) for label, item in labelled if can_hold(item) or (deep and _hides(item))]
    return list((named | places).values())


def _container(holder: Any, *, is_root: bool, deep: bool) -> Any:
    """Return what holds the values of an object: itself, or its attributes; nothing of an object that other threads may change."""
    if isinstance(holder, _CONTAINERS):
        return holder
    if deep and (hidden := hidden_container(holder, _WITHOUT_SLOTS)) is not None:
        return hidden
    attributes = None if not is_root and is_shared(holder) else attributes_in(holder)
    return {} if attributes is None else attributes


def _own_functions(holder: Any, labelled: list[tuple[str, Any]]) -> set[int]:
    """Return the ids of the functions that are attributes of a module."""
    return {id(item) for _, item in labelled if isinstance(holder, nn.Module) and isinstance(item, FunctionType)}


def _hides(item: Any) -> bool:
    return hidden_container(item, _WITHOUT_SLOTS) is not None


def holds_hidden(value: Any) -> bool:
    """Return whether a value has state that is neither in attributes nor items: in slots, an array, or per thread."""
    return not isinstance(value, (tuple, frozenset)) and _hides(value)


def _hooks(module: nn.Module) -> Iterator[Any]:
    """Yield the hooks that a call or a backward of the module runs."""
    for table in (*forward_hooks_of(module), *backward_hooks_of(module)):
        yield from table.values()
    for table in GLOBAL_FORWARD_HOOKS:
        yield from table.values()


def _closed_over(function: Any) -> Iterator[Any]:
    """Yield the variables that a function closes over and its defaults, the object of a method, the arguments bound by a partial."""
    parts: tuple[Any, ...]
    if isinstance(function, FunctionType):
        if _is_foreign(function):
            return
        yield from function.__closure__ or ()
        parts = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    elif isinstance(function, MethodType):
        parts = (function.__func__, function.__self__)
    else:
        parts = (function.func, *function.args, *function.keywords.values())
    yield from (part for part in parts if can_hold(part))


def _named(function: Any) -> Iterator[Any]:
    """Yield the global containers that a user's function names; their items are not searched."""
    if isinstance(function, FunctionType) and not _is_foreign(function):
        for name in names_in(function.__code__) & function.__globals__.keys():
            if isinstance(value := function.__globals__[name], _CONTAINERS):
                yield value


def _labelled(container: Any, name: str) -> list[tuple[str, Any]]:
    """Return (path, item) of each item but plain ones; the items of a list have the path of the list."""
    if isinstance(container, (dict, Slots)):
        items = [(key, item) for key, item in content_of(container) if type(item) not in _PLAIN]
        return [(f"{name}.{_label(key)}".lstrip("."), item) for key, item in items]
    return [(name, item) for item in _items(container) if type(item) not in _PLAIN]


def _label(key: Any) -> str:
    """Return the text of a key; of a user object its type, since to write it may fail."""
    return str(key) if type(key) in (str, int, bool, NoneType) else type(key).__name__


def _items(container: Any) -> Iterable[Any]:
    if isinstance(container, (CellType, Slots)):
        return [value for _, value in content_of(container)]
    return [] if is_array(container) else values_in(container)


def _is_foreign(value: Any) -> bool:
    return str(getattr(value, "__module__", "")).partition(".")[0] in _FOREIGN


def can_hold(value: object) -> bool:
    """Return whether a value may contain others: a container, a module, a function, an object of a user's class."""
    if isinstance(value, (nn.Module, FunctionType, MethodType, partial, *_CONTAINERS)):
        return True
    if isinstance(value, (type, torch.Tensor, LiftedNumber)) or not isinstance(attributes_in(value), dict):
        return False  # `list[int].__dict__` is that of the class, which cannot be written
    return type(value).__module__.partition(".")[0] not in _FOREIGN


def content_of(container: Any) -> list[Any]:
    """Return the content of a container: (key, value) pairs of attributes, dicts and variables, else the items; of an array a copy."""
    if isinstance(container, Slots):
        return container.pairs()
    if is_array(container):
        return array_content(container)
    if isinstance(container, CellType):
        try:
            return [("cell_contents", container.cell_contents)]
        except ValueError:  # not assigned yet
            return []
    return items_in(container)


def set_content(container: Any, content: list[Any]) -> bool:
    """Give a container its content back, and return whether it had another. An unchanged container is not touched."""
    if has_content(container, content):
        return False
    if is_array(container):
        set_array(container, content)
    elif isinstance(container, Slots):
        container.fill(content)
    elif isinstance(container, CellType):
        container.cell_contents = content[0][1] if content else None
    else:
        refill(container, content)
    return True


def has_content(container: Any, content: list[Any]) -> bool:
    """Return whether a container consists of the very objects that `content_of` has returned; an array, of equal numbers."""
    if is_array(container):
        return has_numbers(container, content)
    return _same(content_of(container), content, is_pairs=isinstance(container, (dict, CellType, Slots)))


def _same(now: list[Any], then: list[Any], *, is_pairs: bool) -> bool:
    """Return whether two contents consist of identical objects."""
    if len(now) != len(then):
        return False
    if is_pairs:
        return all(a[0] is b[0] and a[1] is b[1] for a, b in zip(now, then, strict=True))
    return all(a is b for a, b in zip(now, then, strict=True))
