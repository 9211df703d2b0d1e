"""Safe reading of pickles, by the unpickler that is written in Python. Nothing of a file is executed, and its length bounds time and memory.

The unpickler in C reserves memory for the number of a memo entry, whatever it is: nine bytes of a file took 4 GiB. A file decides what is
hashed, and a tuple of tuples can take forever to hash: 60 levels of two take 2**60 steps. So keys of dicts are checked first.

`plain_value` reads plain data:

    lists, tuples, dicts with keys that are texts or whole numbers      read
    classes, functions, sets, other keys                                refused
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pickle import Unpickler as PureUnpickler
else:
    PureUnpickler = vars(pickle)["_Unpickler"]

__all__ = ["PureUnpickler", "operations", "plain_value", "refuse"]

_PURE: Any = PureUnpickler

_HASHING = (pickle.DICT[0], pickle.FROZENSET[0], pickle.ADDITEMS[0])
"""Operations other than SETITEM and SETITEMS that hash what the file has. The first is of protocol 0, which torch does not write."""


def operations(is_key: Callable[[Any], bool], keys: str) -> dict[int, Callable[[Any], None]]:
    """Return the `dispatch` of an unpickler that puts a key into a dict only if `is_key`, and makes no sets. `keys` says what keys are."""

    def check(found: list[Any]) -> None:
        if not all(map(is_key, found)):
            raise pickle.UnpicklingError(f"a key of it is not {keys}")

    def set_items(unpickler: Any) -> None:
        check(unpickler.stack[::2])
        _PURE.load_setitems(unpickler)

    def set_item(unpickler: Any) -> None:
        check(unpickler.stack[-2:-1])
        _PURE.load_setitem(unpickler)

    return {
        **_PURE.dispatch,
        **dict.fromkeys(_HASHING, refuse),
        pickle.SETITEM[0]: set_item,
        pickle.SETITEMS[0]: set_items,
    }


def refuse(_unpickler: Any) -> None:
    """Raise UnpicklingError: the operation is not allowed."""
    raise pickle.UnpicklingError("it has more than plain data")


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
