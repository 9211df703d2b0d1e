"""The unpickler that is written in Python. That of C reserves memory for any number that a memo entry has: nine bytes of a file took 4 GiB.

A file decides what is hashed, and a tuple of tuples can take forever to hash: 60 levels of two take 2**60 steps. So keys of dicts are
checked before they are hashed.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pickle import Unpickler as PureUnpickler
else:
    PureUnpickler = vars(pickle)["_Unpickler"]

__all__ = ["PureUnpickler", "operations", "refuse"]

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
