"""Equality of values to a recording: Python's `==` is too weak, as 1 == 1.0 == True, and a tensor of one element equals its number."""

from __future__ import annotations

import sys
from types import MethodType
from typing import Any

import torch

__all__ = ["is_same"]

_NUMBERS = (float, complex)
_STANDARD = frozenset(sys.stdlib_module_names) | {"builtins"}
_TORCH_VALUES = (torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format)


def is_same(before: Any, now: Any) -> bool:
    """Return whether a recording made with `before` is right for `now`.

    Immutable values are compared, and numbers of different types differ. All other values are the same if they are identical.
    """
    if before is now:
        return True
    if type(before) is not type(now):
        return False
    if isinstance(before, _NUMBERS):
        return repr(before) == repr(now)
    if isinstance(before, tuple):
        return len(before) == len(now) and all(map(is_same, before, now))
    if isinstance(before, MethodType):
        return before.__func__ is now.__func__ and before.__self__ is now.__self__
    return _is_value(before) and _equal(before, now)


def _is_value(value: Any) -> bool:
    """Return whether a value is immutable: hashable by its content, of Python, numpy or torch."""
    cls = type(value)
    if isinstance(value, _TORCH_VALUES):
        return True
    package = cls.__module__.partition(".")[0]
    hashing: Any = cls.__hash__
    is_value = hashing is not None and hashing is not object.__hash__
    return is_value and (package in _STANDARD or package == "numpy") and not callable(value)


def _equal(before: Any, now: Any) -> bool:
    try:
        return bool(before == now) or repr(before) == repr(now) == "nan"
    except (TypeError, ValueError, RuntimeError):
        return False
