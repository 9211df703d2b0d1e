"""Pickles of plain data: containers, texts and numbers. Nothing of a file is executed, and its length bounds time and memory.

    lists, tuples, dicts with keys that are texts or whole numbers      read
    classes, functions, sets, other keys                                refused

A tuple is no key: the hash of a tuple of tuples can take forever.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

from pipecompile.parameters.pure_unpickler import PureUnpickler, operations, refuse

__all__ = ["plain_value"]

_OPERATIONS = (
    "PROTO FRAME STOP MARK NONE NEWTRUE NEWFALSE INT BININT BININT1 BININT2 LONG LONG1 LONG4 FLOAT BINFLOAT UNICODE BINUNICODE "
    "SHORT_BINUNICODE BINUNICODE8 EMPTY_LIST APPEND APPENDS LIST EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_DICT SETITEM SETITEMS "
    "PUT BINPUT LONG_BINPUT MEMOIZE GET BINGET LONG_BINGET POP POP_MARK"
).split()
"""Operations of pickles that make containers, texts and numbers."""


def plain_value(content: bytes) -> Any:
    """Return the value of a pickle. Raise UnpicklingError, or whatever a damaged pickle raises."""
    return _PLAIN_UNPICKLER(io.BytesIO(content)).load()


def _find_class(_unpickler: Any, module: str, name: str) -> Any:
    raise pickle.UnpicklingError(f"it refers to {module}.{name}, and is to have plain data alone")


_KNOWN = {getattr(pickle, name)[0] for name in _OPERATIONS}
_KEYS = operations(lambda key: type(key) in (str, int), "a text or a whole number")
_RUNS = {number: run if number in _KNOWN else refuse for number, run in _KEYS.items()}
_PLAIN_UNPICKLER: Any = type("PlainUnpickler", (PureUnpickler,), {"find_class": _find_class, "dispatch": _RUNS})
