"""Any value as a short text, for a message that shows what a user passed.

    10**5000                  a number of thousands of digits     Python refuses to write it
    ["a"] * 1000              ['a', 'a', 'a', 'a', 'a', 'a', 'a', 'a', ...]
    Route("@0", 0, (1,))      Route(value='@0', source=0, ...)    data of a dataclass, by its fields
    len, nn.Linear            len, Linear                         what has a name, by its name
    object()                  <object>                            any other object, by its class

No code of a value's own class runs but that of containers and numbers, and what fails there is caught: a `__repr__` may raise, take
minutes, or read a tensor of a device. The text has at most `MOST` characters, and the time is bounded whatever a container holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import fields, is_dataclass
from enum import Enum
from itertools import islice
from numbers import Number
from pathlib import PurePath
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

__all__ = ["MOST", "shown", "type_text"]

MOST = 240
"""Characters of a text."""

_TEXT, _ENTRIES, _DEPTH = 80, 8, 3
_NAMED = (type, FunctionType, BuiltinFunctionType, MethodType)
_WRITTEN = {"device", "dtype", "layout", "memory_format"}
"""Classes of torch that write themselves as a user does."""


def shown(value: object) -> str:
    """Return `value` as a user writes it, as far as a short text can; an object of another class by the class's name."""
    text = _text(value, _DEPTH)
    return text if len(text) <= MOST else f"{text[: MOST - 3]}..."


def type_text(value: object) -> str:
    """Return the class of `value` with its article: a Tensor, an int."""
    name = type(value).__name__
    return f"{'an' if name[0].lower() in 'aeio' else 'a'} {name}"


def _text(value: object, depth: int) -> str:
    try:
        return _written(value, depth)
    except Exception:
        return f"<{type(value).__name__}>"


def _written(value: Any, depth: int) -> str:
    if value is None or value is ... or isinstance(value, bool):
        return repr(value)
    if isinstance(value, Enum):
        return f"{type(value).__name__}.{value.name}"
    if isinstance(value, str | bytes | bytearray | PurePath):
        return _shortened(value)
    if isinstance(value, int):
        return _whole(value)
    if isinstance(value, _NAMED):
        return str(value.__name__)
    return _parts(value, depth) or _short(value)


def _short(value: Any) -> str:
    kind = type(value)
    if isinstance(value, range | Number) or (kind.__module__ == "torch" and kind.__name__ in _WRITTEN):
        text = repr(value)
        return text if len(text) <= _TEXT else f"{text[: _TEXT - 3]}..."
    return f"<{kind.__name__}>"


def _shortened(value: Any) -> str:
    """Return both ends of a text: of a path, the end tells more."""
    text = str(value) if isinstance(value, PurePath) else value
    if len(text) <= _TEXT:
        return repr(text)
    return f"{text[: _TEXT // 2]!r}...{text[-_TEXT // 2 :]!r}"


def _whole(value: int) -> str:
    if value.bit_length() > 8_000:  # Python writes 4,300 digits, or as few as 640 if told so
        return "a number of thousands of digits"
    text = repr(value)
    return text if len(text) <= _TEXT else f"{text[: _TEXT // 2]}...{text[-_TEXT // 2 :]}"


def _parts(value: Any, depth: int) -> str:
    """Return the text of a container or of a dataclass; empty for anything else."""
    if is_dataclass(value):
        named = ((one.name, getattr(value, one.name)) for one in fields(value) if one.repr)
        return _joined(f"{type(value).__name__}(", ")", named, depth, lambda pair, d: f"{pair[0]}={_text(pair[1], d)}")
    if isinstance(value, Mapping):
        return _joined("{", "}", value.items(), depth, lambda pair, d: f"{_text(pair[0], d)}: {_text(pair[1], d)}")
    if isinstance(value, AbstractSet):
        name = type(value).__name__
        start, end = ("{", "}") if isinstance(value, set) else (f"{name}({{", "})")
        return _joined(start, end, value, depth, _text) if value else f"{name}()"
    if isinstance(value, tuple):
        return _joined("(", ",)" if len(value) == 1 else ")", value, depth, _text)
    return _joined("[", "]", value, depth, _text) if isinstance(value, list) else ""


def _joined(start: str, end: str, entries: Iterable[Any], depth: int, text: Callable[[Any, int], str]) -> str:
    if depth == 0:
        return f"{start}...{end}"
    first = list(islice(entries, _ENTRIES + 1))
    texts = [text(entry, depth - 1) for entry in first[:_ENTRIES]]
    return start + ", ".join(texts + ["..."] * (len(first) > _ENTRIES)) + end
