"""The state of one container: its length, its keys, and where each item is found."""

from __future__ import annotations

import enum
from collections import deque
from typing import Any

import torch

from pipecompile.tracing.container_items import builtin_type, keys_in, values_in
from pipecompile.tracing.guards.lifted_state import Holder
from pipecompile.tracing.guards.object_state import Walk
from pipecompile.tracing.guards.read_state import Place

__all__ = ["ATOMS", "add_container", "is_atom"]

ATOMS = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device, torch.Size, range, enum.Enum)
"""Types of values without parts."""


def is_atom(value: Any) -> bool:
    """Return whether a value has no parts: of these types, or a member of an enum of C++, such as `SDPBackend.MATH`."""
    return isinstance(value, ATOMS) or _is_native_enum(type(value))


def _is_native_enum(cls: type) -> bool:
    return hasattr(cls, "__members__") and any(base.__module__ == "pybind11_builtins" for base in cls.__mro__)


_MANY = 256
"""Items from which on a container of plain values is one value, without a label per item."""

_KEYED = (dict, list, deque)
"""Containers whose items can be replaced."""


def add_container(walk: Walk, value: Any, label: str, place: Place) -> None:
    """Note the kind of a container, its keys and every item."""
    items = list(values_in(value))
    if not isinstance(value, (tuple, frozenset)):
        if type(value).__len__ is builtin_type(value).__len__:
            walk.state.sized.append(value)
        else:
            walk.state.add_row(_stored_length, value)
        _add_items(walk, value, label)
    keys = list(keys_in(value)) if isinstance(value, dict) else range(len(items))
    if len(items) > _MANY and all(isinstance(item, ATOMS) for item in items):
        walk.state.add(label, (type(value), tuple(keys), tuple(items)), place)
        return
    members = frozenset(values_in(value)) if isinstance(value, (set, frozenset)) else tuple(keys)
    walk.state.add(label, (type(value), members), place)
    for key, item in zip(keys, items, strict=True):
        holder = Holder(value, key) if isinstance(value, _KEYED) and isinstance(key, (int, str)) else None
        walk.later(item, _item_label(label, key), place, holder)


def _add_items(walk: Walk, container: Any, label: str) -> None:
    """Note keys and items as rows, without those that are read at every run."""
    base = builtin_type(container)
    keys = list(keys_in(container)) if isinstance(container, dict) else list(range(len(container)))
    items = list(values_in(container)) if isinstance(container, _KEYED) else []
    read = {key for key, item in zip(keys, items, strict=False) if walk.is_lifted(_item_label(label, key), item)}
    if isinstance(container, dict) or not read:
        walk.state.add_row(base.__iter__, container)
    if read:
        walk.state.add_names(container, [key for key in keys if key not in read])
    elif isinstance(container, dict):
        walk.state.add_row(dict.values, container)


def _item_label(label: str, key: Any) -> str:
    return f"{label}[{key!r}]" if isinstance(key, (int, str)) else f"{label}[...]"


def _stored_length(container: Any) -> tuple[int]:
    """Return the number of items, past a `__len__` of the user's."""
    return (builtin_type(container).__len__(container),)
