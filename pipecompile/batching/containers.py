"""Objects that hold tensors as pytrees: dataclasses, caches, subclasses of dict, anything with attributes.

    with_shells(value)  ──►  value with an ObjectShell, a pytree node, in the place of every such object
    leaves, spec = flatten_containers(value)    gives the tensors; pytree.tree_unflatten(leaves, spec) builds a new object

The user's classes are not registered as pytrees. An object that holds no tensor stays a leaf.
"""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Callable, Iterator, MappingView, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import FunctionType, MappingProxyType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from pipecompile.batching.block_masks import function_shell, is_block_mask, is_of_mask
from pipecompile.errors import InputError
from pipecompile.text.shown_value import shown
from pipecompile.torch_private import pytree
from pipecompile.torch_private.fx_graphs import register_pytree_flatten_spec

__all__ = [
    "ObjectLayout",
    "ObjectShell",
    "Unread",
    "argument_leaves",
    "built",
    "check_rereadable",
    "copied",
    "flatten_containers",
    "hides_tensors",
    "object_shell",
    "shell_of",
    "with_shells",
]


class Unread:
    """The base of containers whose items stay unread: they are leaves."""


_BUILTIN_CONTAINERS = (dict, list, tuple, set, frozenset, deque)
_LEAF_TYPES = (torch.Tensor, nn.Module, type, ModuleType, FunctionType, str, bytes, int, float, complex, torch.Generator,
           torch.dtype, torch.device, torch.Size, torch.SymInt, torch.SymFloat, torch.SymBool, type(None), torch.nn.utils.rnn.PackedSequence, DeviceMesh, Unread)  # fmt: skip
_MAX_OBJECTS = 2000
"""Objects that a search for tensors visits before it gives up: a larger object is the program itself, not an argument."""


@dataclass(frozen=True, slots=True)
class ObjectLayout:
    """An object without its values: its class, the built-in container that it derives from, and where each value belongs.

    Values are ordered: items of the container (under `keys`), then attributes.
    """

    kind: type
    content: type | None
    keys: tuple[Any, ...]
    attributes: tuple[str, ...]

    def build(self, values: Sequence[Any]) -> Any:
        """Return a new object of this layout, without running its `__init__`."""
        count = len(values) - len(self.attributes)
        instance = self._with_items(values[:count])
        for name, value in zip(self.attributes, values[count:], strict=True):
            object.__setattr__(instance, name, value)
        return instance

    def _with_items(self, items: Sequence[Any]) -> Any:
        if self.content is None:
            new: Any = self.kind.__new__
            return object.__new__(self.kind) if isinstance(new, FunctionType) else new(self.kind)
        content: Any = self.content
        if content in (tuple, frozenset):
            return content.__new__(self.kind, items)
        instance = content.__new__(self.kind)
        if self.content is dict:
            for key, item in zip(self.keys, items, strict=True):
                dict.__setitem__(instance, key, item)
        else:
            set.update(instance, items) if content is set else content.extend(instance, items)
        return instance


@dataclass(frozen=True, slots=True)
class ObjectShell:
    """An object as a pytree node: its layout and its values."""

    layout: ObjectLayout
    values: tuple[Any, ...] = field(repr=False)


def flatten_containers(value: Any) -> tuple[list[Any], pytree.TreeSpec]:
    """Return the leaves of a value, in order, and its structure. Raise InputError for containers without an end."""
    try:
        leaves, spec = pytree.tree_flatten(value)
    except RecursionError:
        why = "it holds itself, or is nested too deeply"
        raise InputError(f"{shown(value)} cannot be taken apart into tensors", why=why) from None
    if not any(_is_container(leaf) and _holds_tensors(leaf) for leaf in leaves):
        return leaves, spec
    return pytree.tree_flatten(with_shells(value))


def check_rereadable(leaves: Sequence[Any], names: Callable[[], Sequence[str]]) -> None:
    """Raise InputError for an iterator among the leaves, which gives its items to one reader, and for a view of tensors, which cannot be
    divided. Recording, comparison and every micro-batch read an input and a target.
    """
    for place, leaf in enumerate(leaves):
        if isinstance(leaf, _LEAF_TYPES) or not isinstance(leaf, (Iterator, MappingView, MappingProxyType)):
            continue
        if isinstance(leaf, Iterator):
            why = "it gives its items once, and the comparison with the model and every micro-batch read them"
        elif hides_tensors(leaf):
            why = "its tensors cannot be divided into micro-batches"
        else:
            continue
        name, make = names()[place], "dict" if isinstance(leaf, MappingProxyType) else "list"
        raise InputError(f"{name} is a {type(leaf).__name__}", why=why, hint=f"{make}({name})")


def argument_leaves(arguments: Any) -> list[Any]:
    """Return the leaves of a call's arguments, and in the place of a function of a mask what it closes over."""
    found: list[Any] = []
    for leaf in flatten_containers(arguments)[0]:
        found += pytree.tree_leaves(_leaf_with_shells(leaf, (), in_mask=True)) if is_of_mask(leaf) else [leaf]
    return found


def copied(value: Any) -> Any:
    """Return an input or a target with copies of its tensors, containers and objects: leaves that require a gradient as before."""
    leaves, spec = flatten_containers(value)
    copies = [
        one.detach().clone().requires_grad_(one.requires_grad) if isinstance(one, torch.Tensor) else one
        for one in leaves
    ]
    return pytree.tree_unflatten(copies, spec)


def with_shells(value: Any) -> Any:
    """Return the value with an ObjectShell in the place of every object that holds tensors; all else stays as it is."""
    leaves, spec = pytree.tree_flatten(value)
    if not any(_is_container(leaf) and _holds_tensors(leaf) for leaf in leaves):
        return value
    return pytree.tree_unflatten([_leaf_with_shells(leaf, ()) for leaf in leaves], spec)


def _leaf_with_shells(value: Any, enclosing: tuple[int, ...], *, in_mask: bool = False) -> Any:
    """Return a leaf as a shell, its values too. `enclosing` are the ids of the objects around it, to stop at cycles.

    A function becomes a shell if it is `in_mask`, a part of a BlockMask.
    """
    in_mask = in_mask or is_block_mask(value)
    inner = partial(_leaf_with_shells, enclosing=(*enclosing, id(value)), in_mask=in_mask)
    if in_mask and isinstance(value, FunctionType) and id(value) not in enclosing:
        return function_shell(value, inner)
    if not _is_container(value) or id(value) in enclosing or not _holds_tensors(value):
        return value
    layout, values = _layout_and_values(value)
    return ObjectShell(layout, tuple(pytree.tree_map(inner, values)))


def shell_of(value: Any) -> ObjectShell | None:
    """Return the shell of an object that holds tensors, its values as they are; None for a built-in container or any other."""
    return (
        None
        if type(value) in _BUILTIN_CONTAINERS or not _is_container(value) or not _holds_tensors(value)
        else object_shell(value)
    )


def object_shell(value: Any) -> ObjectShell:
    """Return the shell of any object."""
    layout, values = _layout_and_values(value)
    return ObjectShell(layout, tuple(values))


def built(layout: ObjectLayout, values: Sequence[Any]) -> Any:
    """Return a new object of this layout. Plans name graph nodes after this function: its name is a part of their format."""
    return layout.build(values)


def _is_container(value: Any) -> bool:
    """Return whether an object can be flattened: a built-in container or an object with attributes."""
    return not isinstance(value, _LEAF_TYPES) and (isinstance(value, _BUILTIN_CONTAINERS) or bool(_attributes(value)))


def _holds_tensors(value: Any) -> bool:
    """Return whether a tensor can be reached through containers, among at most `_MAX_OBJECTS` objects."""
    pending, seen = [value], {id(value)}
    while pending and len(seen) < _MAX_OBJECTS:
        current = pending.pop()
        if isinstance(current, torch.Tensor):
            return True
        inner = pytree.tree_leaves(_layout_and_values(current)[1]) if _is_container(current) else []
        new = {id(leaf): leaf for leaf in inner if id(leaf) not in seen}
        seen.update(new)
        pending += new.values()
    return False


def _layout_and_values(value: Any) -> tuple[ObjectLayout, list[Any]]:
    """Return the layout of an object, and its values: items of its built-in container, then attributes."""
    content = next((kind for kind in _BUILTIN_CONTAINERS if isinstance(value, kind)), None)
    keys = tuple(value) if content is dict else tuple(range(len(value))) if content is not None else ()
    items = list(dict.values(value)) if content is dict else list(value) if content is not None else []
    names = tuple(_attributes(value))
    return ObjectLayout(type(value), content, keys, names), [*items, *(getattr(value, name) for name in names)]


def _attributes(value: Any) -> list[str]:
    """Return the names of the attributes of an object, in its `__dict__` and in slots."""
    slots = [name for kind in type(value).__mro__ for name in _slots(kind)]
    return [*getattr(value, "__dict__", ()), *(name for name in slots if hasattr(value, name))]


def _slots(kind: type) -> tuple[str, ...]:
    """Return the slots of one class, private names as Python mangles them."""
    slots = vars(kind).get("__slots__", ())
    names = (slots,) if isinstance(slots, str) else tuple(slots)
    hidden = [f"_{kind.__name__.lstrip('_')}{n}" if n.startswith("__") and not n.endswith("__") else n for n in names]
    return tuple(name for name in hidden if name not in ("__dict__", "__weakref__"))


def hides_tensors(value: Any) -> bool:
    """Return whether a tensor can be reached from a leaf that is no container: an iterator, a closure, an object of C."""
    pending, seen = [value], {id(value)}
    while pending and len(seen) < _MAX_OBJECTS:
        current = pending.pop()
        if isinstance(current, torch.Tensor):
            return True
        if isinstance(current, (nn.Module, type, ModuleType)):
            continue
        referents = (
            [*(current.__closure__ or ()), current.__defaults__]
            if isinstance(current, FunctionType)
            else gc.get_referents(current)
        )
        new = [referent for referent in referents if id(referent) not in seen]
        seen.update(map(id, new))
        pending += new
    return False


def _flatten(value: Any) -> tuple[list[Any], ObjectLayout]:
    """Flatten a shell; or an object itself, if a spec of another call says that it is a shell."""
    if isinstance(value, ObjectShell):
        return list(value.values), value.layout
    layout, values = _layout_and_values(value)
    return values, layout


def _flatten_with_keys(value: Any) -> tuple[list[tuple[Any, Any]], ObjectLayout]:
    values, layout = _flatten(value)
    names = [*(pytree.MappingKey(key) for key in layout.keys), *map(pytree.GetAttrKey, layout.attributes)]
    return list(zip(names, values, strict=True)), layout


pytree.register_pytree_node(
    ObjectShell,
    _flatten,
    lambda values, layout: layout.build(list(values)),
    serialized_type_name="pipecompile.Shell",
    flatten_with_keys_fn=_flatten_with_keys,
)
register_pytree_flatten_spec(ObjectShell, lambda value, _spec: _flatten(value)[0])
