"""Pickles of plain data: containers, texts and numbers. Nothing of a file is executed, and its length bounds time and memory.

    lists, tuples, dicts with keys that are texts or whole numbers      read
    classes, functions, sets, other keys                                refused

The hash of a tuple of tuples can take for ever, so a tuple is no key.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

from pipecompile.parameters.pure_unpickler import PureUnpickler

__all__ = ["plain_value"]

_OPERATIONS = (
    "PROTO FRAME STOP MARK NONE NEWTRUE NEWFALSE INT BININT BININT1 BININT2 LONG LONG1 LONG4 FLOAT BINFLOAT UNICODE BINUNICODE "
    "SHORT_BINUNICODE BINUNICODE8 EMPTY_LIST APPEND APPENDS LIST EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_DICT SETITEM SETITEMS "
    "PUT BINPUT LONG_BINPUT MEMOIZE GET BINGET LONG_BINGET POP POP_MARK"
).split()
"""Operations of pickles that make containers, texts and numbers."""

_PURE: Any = PureUnpickler


def plain_value(content: bytes) -> Any:
    """Return the value of a pickle. Raise UnpicklingError, or whatever a damaged pickle raises."""
    return _PLAIN_UNPICKLER(io.BytesIO(content)).load()


def _find_class(_unpickler: Any, module: str, name: str) -> Any:
    raise pickle.UnpicklingError(f"it refers to {module}.{name}, and is to have plain data alone")


def _set_items(unpickler: Any) -> None:
    _check_keys(unpickler.stack[::2])
    _PURE.load_setitems(unpickler)


def _set_item(unpickler: Any) -> None:
    _check_keys(unpickler.stack[-2:-1])
    _PURE.load_setitem(unpickler)


def _refused(_unpickler: Any) -> None:
    raise pickle.UnpicklingError("it has more than plain data")


def _check_keys(keys: list[Any]) -> None:
    if any(type(key) not in (str, int) for key in keys):
        raise pickle.UnpicklingError("a key of it is neither a text nor a whole number")


_KNOWN = {getattr(pickle, name)[0] for name in _OPERATIONS}
_RUNS = {number: run if number in _KNOWN else _refused for number, run in _PURE.dispatch.items()}
_RUNS |= {pickle.SETITEM[0]: _set_item, pickle.SETITEMS[0]: _set_items}
_PLAIN_UNPICKLER: Any = type("PlainUnpickler", (_PURE,), {"find_class": _find_class, "dispatch": _RUNS})
