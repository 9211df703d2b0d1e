"""Objects that hold tensors as pytrees: dataclasses, caches, subclasses of dict, anything with attributes.

    with_shells(value)  ──►  value with an ObjectShell, a pytree node, instead of every such object
    leaves, spec = flatten_containers(value)    gives the tensors; pytree.tree_unflatten(leaves, spec) builds a new object

The user's classes are not registered as pytrees. An object that holds no tensor stays a leaf. A container with attributes gets a shell
even if its class is registered: the registered functions know only its items, and may pass them to `__init__` in another order.
"""

from __future__ import annotations

import gc
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, MappingView, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import FunctionType, MappingProxyType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from pipecompile.batching.block_masks import function_shell, is_block_mask, is_of_mask
from pipecompile.batching.object_layout import BUILTIN_CONTAINERS, ObjectLayout, attributes_of, layout_and_values
from pipecompile.errors import InputError
from pipecompile.text.shown_value import shown, type_text
from pipecompile.torch_private import pytree
from pipecompile.torch_private.device_functions import to_device
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
    "has_attributes",
    "hides_tensors",
    "object_shell",
    "on_device",
    "shell_of",
    "with_shells",
    "with_tensors",
]


class Unread:
    """The base of containers whose items stay unread: they are leaves."""


_LEAF_TYPES = (torch.Tensor, nn.Module, type, ModuleType, FunctionType, str, bytes, int, float, complex, torch.Generator,
           torch.dtype, torch.device, torch.Size, torch.SymInt, torch.SymFloat, torch.SymBool, type(None), torch.nn.utils.rnn.PackedSequence, DeviceMesh, Unread)  # fmt: skip
_MAX_OBJECTS = 2000
"""Objects that a search for tensors visits before it gives up: a larger object is the program itself, not an argument."""


@dataclass(frozen=True, slots=True)
class ObjectShell:
    """An object as a pytree node: its layout and its values."""

    layout: ObjectLayout
    values: tuple[Any, ...] = field(repr=False)


def flatten_containers(value: Any) -> tuple[list[Any], pytree.TreeSpec]:
    """Return the leaves of a value, in order, and its structure. Raise InputError for containers without an end."""
    try:
        leaves, spec = pytree.tree_flatten(value, has_attributes)
    except RecursionError:
        why = "it holds itself, or is nested too deeply"
        raise InputError(f"{shown(value)} cannot be taken apart into tensors", why=why) from None
    if not any(map(_is_object, leaves)):
        return leaves, spec
    return pytree.tree_flatten(pytree.tree_unflatten([_leaf_with_shells(leaf, ()) for leaf in leaves], spec))


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
        raise InputError(f"{name} is {type_text(leaf)}", why=why, hint=f"{make}({name})")


def argument_leaves(arguments: Any) -> list[Any]:
    """Return the leaves of a call's arguments, and for a function of a mask the values that it closes over."""
    found: list[Any] = []
    for leaf in flatten_containers(arguments)[0]:
        found += pytree.tree_leaves(_leaf_with_shells(leaf, (), in_mask=True)) if is_of_mask(leaf) else [leaf]
    return found


def with_tensors(value: Any, convert: Callable[[torch.Tensor], Any]) -> Any:
    """Return a value with new containers and objects, and with `convert(tensor)` in the place of each tensor."""
    leaves, spec = flatten_containers(value)
    return pytree.tree_unflatten([convert(one) if isinstance(one, torch.Tensor) else one for one in leaves], spec)


def on_device(value: Any, device: torch.device) -> Any:
    """Return an input or a target with its tensors on `device`, in containers and objects too."""
    if isinstance(value, torch.Tensor):
        return to_device(value, device)
    return with_tensors(value, partial(to_device, device=device))


def copied(value: Any) -> Any:
    """Return an input or a target with copies of its tensors, containers and objects: leaves that require a gradient as before."""
    return with_tensors(value, lambda one: one.detach().clone().requires_grad_(one.requires_grad))


def with_shells(value: Any) -> Any:
    """Return the value with an ObjectShell in the place of every object that holds tensors; all else stays as it is."""
    leaves, spec = pytree.tree_flatten(value, has_attributes)
    if not any(map(_is_object, leaves)):
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
    if id(value) in enclosing or not _is_object(value):
        return value
    layout, values = layout_and_values(value)
    return ObjectShell(layout, tuple(pytree.tree_map(inner, values, is_leaf=has_attributes)))


def shell_of(value: Any) -> ObjectShell | None:
    """Return the shell of an object that holds tensors, its values as they are; None for a built-in container or any other."""
    return (
        None if type(value) in _EXACT or not _is_container(value) or not _holds_tensors(value) else object_shell(value)
    )


def object_shell(value: Any) -> ObjectShell:
    """Return the shell of any object."""
    layout, values = layout_and_values(value)
    return ObjectShell(layout, tuple(values))


def built(layout: ObjectLayout, values: Sequence[Any]) -> Any:
    """Return a new object of this layout. Plans name graph nodes after this function: its name is a part of their format."""
    return layout.build(values)


def has_attributes(value: Any) -> bool:
    """Return whether a value of a class that is registered as a pytree is a container with attributes."""
    if type(value) in _EXACT or not isinstance(value, BUILTIN_CONTAINERS):
        return False
    return pytree.is_registered(type(value)) and bool(attributes_of(value))


_EXACT = (dict, list, tuple, set, frozenset, deque, defaultdict)
"""Containers whose objects have no attributes of their own, but for the attributes that pytrees of torch keep."""


def _is_object(value: Any) -> bool:
    """Return whether a leaf is taken apart: a container with attributes of a registered class, or an object that holds a tensor."""
    return has_attributes(value) or (_is_container(value) and _holds_tensors(value))


def _is_container(value: Any) -> bool:
    """Return whether an object can be flattened: a built-in container or an object with attributes."""
    return not isinstance(value, _LEAF_TYPES) and (isinstance(value, BUILTIN_CONTAINERS) or bool(attributes_of(value)))


def _holds_tensors(value: Any) -> bool:
    """Return whether a tensor can be reached through containers, among at most `_MAX_OBJECTS` objects."""
    pending, seen = [value], {id(value)}
    while pending and len(seen) < _MAX_OBJECTS:
        current = pending.pop()
        if isinstance(current, torch.Tensor):
            return True
        inner = pytree.tree_leaves(layout_and_values(current)[1], has_attributes) if _is_container(current) else []
        new = {id(leaf): leaf for leaf in inner if id(leaf) not in seen}
        seen.update(new)
        pending += new.values()
    return False


def hides_tensors(value: Any) -> bool:
    """Return whether a tensor can be reached from a leaf that is not a container: an iterator, a closure, an object of C."""
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
    layout, values = layout_and_values(value)
    return values, layout


def _flatten_with_keys(value: Any) -> tuple[list[tuple[Any, Any]], ObjectLayout]:
    values, layout = _flatten(value)
    names = [*(pytree.MappingKey(key) for key in layout.keys), *map(pytree.GetAttrKey, layout.own_attributes)]
    return list(zip(names, values, strict=True)), layout


pytree.register_pytree_node(
    ObjectShell,
    _flatten,
    lambda values, layout: layout.build(list(values)),
    serialized_type_name="pipecompile.Shell",
    flatten_with_keys_fn=_flatten_with_keys,
)
register_pytree_flatten_spec(ObjectShell, lambda value, _spec: _flatten(value)[0])
