"""The state of one object: its class, and where each attribute that was read on it is found."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from operator import attrgetter
from types import FunctionType, MemberDescriptorType
from typing import Any, Protocol

import torch
from torch import nn

from pipecompile.torch_private.modules import HOOK_ATTRIBUTES, STATE_TABLES
from pipecompile.tracing.guards.attribute_reads import AttributeReads, Reads
from pipecompile.tracing.guards.lifted_state import Holder
from pipecompile.tracing.guards.read_state import ABSENT, Place, ReadState
from pipecompile.tracing.leaf_modules import is_leaf

__all__ = ["Walk", "add_object", "class_attribute"]

_UNREAD = frozenset({"__class__", "__dict__", "__module__", "__doc__", "__annotations__", "__weakref__"})
_SHAPE_KEEPING = tuple(f"torch.nn.modules.{name}" for name in ("dropout", "batchnorm", "instancenorm", "normalization", "activation"))  # fmt: skip
"""Modules of torch whose layers read their floats at every run, and return the same shape whatever the floats are."""

_PROBABILITIES = ("p", "dropout")
"""Floats of these layers that say how often they draw: of nn.Dropout and nn.MultiheadAttention."""


class ClassNotes(Protocol):
    """The attributes of classes that a walk notes."""

    def note_class(self, cls: type, place: Place) -> None:
        """Note a user class and its bases."""

    def add(self, cls: type, name: str, place: Place) -> None:
        """Note the value of an attribute of a class."""


class Walk(Protocol):
    """The walk along the state, as far as one object needs it."""

    state: ReadState
    written: frozenset[tuple[int, Any]]
    registered: frozenset[int]
    notes: AttributeReads

    def later(self, value: Any, label: str, place: Place, holder: Holder | None = None) -> None:
        """Visit a value in its turn. `holder` is where it is found."""

    def is_lifted(self, label: str, value: Any) -> bool:
        """Return whether the recording reads the value at every run."""

    def reads_of(self, value: Any, label: str) -> Reads | None:
        """Return the names read on an object; None if any may have been read."""

    @property
    def named(self) -> ClassNotes:
        """Attributes of classes."""


def add_object(walk: Walk, value: Any, label: str, place: Place) -> None:
    """Note the class of an object and every attribute that was read on it."""
    own = _own_attributes(value)
    names = _read_names(value, own, walk.reads_of(value, label))
    walk.state.typed.append(value)
    walk.named.note_class(type(value), place)
    tables = [own] + ([own[table] for table in STATE_TABLES if table in own] if isinstance(value, nn.Module) else [])
    if own or names:
        walk.state.sized.append(own)
    held: defaultdict[int, list[str]] = defaultdict(list)
    for name, where in names.items():
        if isinstance(_static(type(value), name), MemberDescriptorType):
            _add_slot(walk, value, name, f"{label}.{name}", where or place)
        elif name not in _UNREAD and not _is_live(walk, value, own, name):
            index = _find(walk, value, tables, name, where or place)
            if index is not None:
                held[index].append(name)
                walk.later(tables[index][name], f"{label}.{name}", where or place, Holder(tables[index], name))
            elif _holder(type(value), name) is None:
                walk.state.add(f"{label}.{name}", ABSENT, where or place)
                walk.state.sized += tables[1:]
        elif isinstance(own.get(name), torch.Tensor) or (id(own), name) in walk.written:
            _add_registration(walk, tables[1:], f"{label}.{name}", name)
    for table, found in ((tables[index], found) for index, found in held.items()):
        walk.state.add_names(table, [name for name in found if not walk.is_lifted(f"{label}.{name}", table[name])])


def _read_names(value: Any, own: Mapping[str, Any], reads: Reads | None) -> Reads:
    """Return the names that were read on an object: all that it has, if any may have been."""
    is_whole = reads is None or "__dict__" in reads or _reads_itself(type(value))
    names = dict(reads or {})
    if is_whole:
        names |= {name: names.get(name, "") for name in (*own, *_slots(type(value))) if isinstance(name, str)}
    return names


def _add_registration(walk: Walk, tables: list[Any], label: str, name: str) -> None:
    """Note that a tensor that every run reads anew, or leaves, is not a parameter or buffer, as it is after `remove_weight_norm`."""
    walk.state.add(f"registered: {label}", any(name in table for table in tables), "")
    walk.state.sized += tables


def _own_attributes(value: Any) -> Mapping[str, Any]:
    """Return the attributes of an object, also of one that shows those of another."""
    read = object.__getattribute__ if _reads_itself(type(value)) else getattr
    try:
        own: Mapping[str, Any] = read(value, "__dict__")
    except AttributeError:  # slots
        return {}
    return own


def _reads_itself(cls: type) -> bool:
    """Return whether a user class finds attributes by a `__getattribute__` of its own, as a proxy does."""
    return isinstance(_static(cls, "__getattribute__"), FunctionType)


def _find(walk: Walk, value: Any, tables: Iterable[Any], name: str, place: Place) -> int | None:
    """Return the table that has an attribute, as Python would find it; note an attribute of the class."""
    cls = _holder(type(value), name)
    attribute = _static(type(value), name)
    is_data = hasattr(type(attribute), "__set__")
    found = next((i for i, table in enumerate(tables) if name in table and (id(table), name) not in walk.written), None)
    if cls is not None and (is_data or found != 0):
        walk.named.add(cls, name, place)
        return None if is_data or found is None else found
    return found


def _holder(cls: type, name: str) -> type | None:
    """Return the class that has an attribute, in the order of the bases."""
    return next((base for base in cls.__mro__ if name in vars(base)), None)


def _static(cls: type, name: str) -> Any:
    """Return the attribute of a class or of its bases, without calling it; None if there is none."""
    return next((vars(base)[name] for base in cls.__mro__ if name in vars(base)), None)


def _slots(cls: type) -> list[str]:
    """Return the names of the slots of a class and of its bases."""
    return [
        name for base in cls.__mro__ for name, value in vars(base).items() if isinstance(value, MemberDescriptorType)
    ]


def _add_slot(walk: Walk, value: Any, name: str, label: str, place: Place) -> None:
    """Note the value of a slot."""
    if hasattr(value, name):
        if not walk.is_lifted(label, getattr(value, name)):
            walk.state.add_row(attrgetter(name, name), value)
        walk.later(getattr(value, name), label, place, Holder(value, name))
    else:
        walk.state.add(label, ABSENT, place)


def class_attribute(cls: type, name: str) -> Any:
    """Return the attribute of a class, without calling it; None for what Python itself keeps there."""
    return None if name in _UNREAD else vars(cls).get(name)


def _is_live(walk: Walk, value: Any, own: Mapping[str, Any], name: str) -> bool:
    """Return whether every run reads the attribute anew, or the signature of a call has it: the mode of a registered module."""
    if (id(own), name) in walk.written:
        return True
    if not isinstance(value, nn.Module):
        return False
    if name == "training":
        return id(value) in walk.registered
    is_number = _is_live_number(name, own.get(name)) and type(value).__module__ in _SHAPE_KEEPING
    is_made = isinstance(own.get(name), torch.Tensor)  # by a hook of weight_norm or of pruning, at every call
    is_node = is_leaf(value) and id(value) not in walk.notes.inlined
    return is_node and (name in HOOK_ATTRIBUTES or is_number or is_made)


def _is_live_number(name: str, number: Any) -> bool:
    """Return whether a layer of torch reads this float at every run, and no other value of it changes whether the layer draws.

    A dropout of probability 0 or 1 draws nothing. With another one it would draw, in the order of the stages.
    """
    return isinstance(number, float) and (name not in _PROBABILITIES or 0.0 < number < 1.0)
