"""Containers that hold state and are neither attributes, lists, dicts nor sets: slots, NumPy arrays, values of one thread, and tuples
around others.
"""

from __future__ import annotations

import sys
import threading
from dataclasses import dataclass
from typing import Any

import torch

from pipecompile.tracing.container_items import attributes_in

__all__ = ["Slots", "array_content", "has_numbers", "hidden_container", "identity", "is_array", "set_array"]

_LARGEST = 2**24
"""Bytes of an array that is copied. A larger one holds data and no counts."""


@dataclass(frozen=True, slots=True)
class Slots:
    """The slots of an object as a container of (name, value) pairs."""

    owner: Any

    def pairs(self) -> list[tuple[str, Any]]:
        """Return the slots that have a value."""
        names = [name for cls in type(self.owner).__mro__ for name in _slots_of(cls)]
        return [(name, getattr(self.owner, name)) for name in names if hasattr(self.owner, name)]

    def fill(self, items: list[tuple[str, Any]]) -> None:
        """Give the object these values, and empty its other slots."""
        wanted = dict(items)
        for name, _ in self.pairs():
            if name not in wanted:
                object.__delattr__(self.owner, name)
        for name, value in items:
            object.__setattr__(self.owner, name, value)


def identity(container: Any) -> int:
    """Return a number for a container, equal for two views of the slots of one object."""
    return id(container.owner) if isinstance(container, Slots) else id(container)


def _slots_of(cls: type) -> tuple[str, ...]:
    slots = vars(cls).get("__slots__", ())
    names = (slots,) if isinstance(slots, str) else tuple(slots)
    mangled = cls.__name__.lstrip("_")
    return tuple(
        f"_{mangled}{name}" if name.startswith("__") and not name.endswith("__") else name
        for name in names
        if name not in ("__dict__", "__weakref__")
    )


def hidden_container(value: Any, foreign: frozenset[str]) -> Any:
    """Return the container that a value is, by which its state is read and restored; None if it is none of these kinds.

    Objects of the packages `foreign` are none.
    """
    if isinstance(value, (tuple, frozenset)):
        return None if isinstance(value, torch.Size) else value
    if type(value) is threading.local:
        return vars(value)
    if is_array(value):
        return value if value.flags.writeable and value.nbytes <= _LARGEST else None
    cls = type(value)
    is_slotted = "__slots__" in vars(cls) and attributes_in(value) is None
    return Slots(value) if is_slotted and cls.__module__.partition(".")[0] not in foreign else None


def is_array(value: Any) -> bool:
    """Return whether a value is an array of NumPy in memory."""
    kind = type(value)
    if kind.__name__ != "ndarray":
        return False
    numpy = sys.modules.get("numpy")
    return numpy is not None and kind is numpy.ndarray


def array_content(array: Any) -> list[Any]:
    """Return the content of an array: a copy."""
    return [array.copy()]


def has_numbers(array: Any, content: list[Any]) -> bool:
    """Return whether an array has the content, bit for bit."""
    (copy,) = content
    return bool(array.shape == copy.shape and array.tobytes() == copy.tobytes())


def set_array(array: Any, content: list[Any]) -> None:
    """Give an array its content back, if it has the same shape."""
    if array.shape == content[0].shape:
        array[...] = content[0]
