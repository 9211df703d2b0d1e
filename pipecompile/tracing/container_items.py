"""The items of a container and the attributes of an object as Python stores them. Methods of the user's classes are not called: a lazy
mapping would import its values, and a config of transformers looks at each name in Python.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable
from typing import Any

__all__ = ["CONTAINERS", "attributes_in", "builtin_type", "items_in", "keys_in", "refill", "size_of", "values_in"]

CONTAINERS = (OrderedDict, dict, list, tuple, set, frozenset, deque)
"""The types of containers; a subclass stands before its base."""

_EXACT = frozenset(CONTAINERS)


def builtin_type(container: Any) -> Any:
    """Return the built-in type that a container is an instance of. Raises TypeError if there is none."""
    if type(container) in _EXACT:
        return type(container)
    for base in CONTAINERS:
        if isinstance(container, base):
            return base
    raise TypeError(f"{type(container).__name__} is not a container")


def attributes_in(value: Any) -> Any:
    """Return the `__dict__` of an object; None if it has none. A `__getattribute__` of its class is not called."""
    try:
        return object.__getattribute__(value, "__dict__")
    except AttributeError:
        return None


def keys_in(mapping: Any) -> Iterable[Any]:
    """Return the stored keys of a mapping, in order."""
    keys: Iterable[Any] = builtin_type(mapping).__iter__(mapping)
    return keys


def values_in(container: Any) -> Iterable[Any]:
    """Return the stored values of a mapping, or the items of another container."""
    base = builtin_type(container)
    values: Iterable[Any] = base.values(container) if issubclass(base, dict) else base.__iter__(container)
    return values


def items_in(container: Any) -> list[Any]:
    """Return the stored (key, value) pairs of a mapping, or the items of another container."""
    base = builtin_type(container)
    return list(base.items(container) if issubclass(base, dict) else base.__iter__(container))


def size_of(container: Any) -> int:
    """Return the number of stored items."""
    size: int = builtin_type(container).__len__(container)
    return size


def refill(container: Any, items: list[Any]) -> None:
    """Replace the items of a mutable container: pairs for a mapping."""
    base = builtin_type(container)
    base.clear(container)
    if issubclass(base, (dict, set)):
        base.update(container, items)
    else:
        base.extend(container, items)
