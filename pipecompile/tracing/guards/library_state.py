"""The state of objects of Python's library and of numpy: bytes, members of weak containers, targets of weak references."""

from __future__ import annotations

import array
import ctypes
import mmap
import weakref
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, Protocol

from pipecompile.text.shown_value import type_text
from pipecompile.tracing.guards.lifted_state import Holder
from pipecompile.tracing.guards.process_state import add_result, returns_state
from pipecompile.tracing.guards.read_state import Place, ReadState, line_of_read

__all__ = ["add_library_object"]

_CLOCKS = {
    ("time", name) for name in ("time", "time_ns", "perf_counter", "perf_counter_ns", "monotonic", "process_time")
}
_CLOCKS |= {("posix", "getpid"), ("nt", "getpid")}
"""Module and name of functions that return another number at every run."""

_MOST_BYTES = 1 << 20
"""Bytes up to which the contents of an array are compared before every run."""

_BUFFERS = (bytearray, memoryview, array.array, mmap.mmap, *ctypes.Structure.__mro__[1:2])
"""The last is the base of all types of ctypes, which has no public name."""

_WEAK_CONTAINERS = (weakref.WeakSet, weakref.WeakKeyDictionary, weakref.WeakValueDictionary)


class _StateWalk(Protocol):
    """The walk along the state, as far as an object of a library needs it."""

    state: ReadState

    def later(self, value: Any, label: str, place: Place, holder: Holder | None = None) -> None:
        """Visit a value in its turn. `holder` is where it is found."""


def _is_array(value: Any) -> bool:
    """Return whether a value is an array of numpy, or a number of numpy."""
    return type(value).__module__ == "numpy" and hasattr(value, "tobytes")


def add_library_object(walk: _StateWalk, value: Any, label: str, place: Place) -> None:
    """Note the identity of an object of a library, and what it holds, if that is known to be state."""
    state = walk.state
    if _is_array(value):
        _add_array(state, value, label, place)
        return
    state.add(label, value, place)
    if isinstance(value, _BUFFERS):
        _add_buffer(state, value, label, place)
    elif isinstance(value, (*_WEAK_CONTAINERS, MappingProxyType)):
        fetch: Callable[[Any], tuple[Any, ...]] = _members if isinstance(value, _WEAK_CONTAINERS) else _pairs
        state.add_row(fetch, value)
        state.add(f"members of {label}", tuple(fetch(value)), place)
    elif isinstance(value, (weakref.ref, *weakref.ProxyTypes)):
        state.add_row(_referent_id, value)
        walk.later(_referent(value), f"{label}()", place)
    elif returns_state(value):
        add_result(state, value, label, place)
    _add_risks(state, value, label, place)


def _add_risks(state: ReadState, value: Any, label: str, place: Place) -> None:
    if (getattr(value, "__module__", ""), getattr(value, "__name__", "")) in _CLOCKS:
        state.risks[label] = f"at {line_of_read(place)}: what it returns is a constant of the recording"
    if hasattr(type(value), "__next__") and not isinstance(value, weakref.ProxyTypes):
        state.risks[label] = f"{type_text(value)}: each call of next changes it, unseen"


def _add_array(state: ReadState, value: Any, label: str, place: Place) -> None:
    state.add(label, (type(value), str(value.dtype), value.shape), place)
    if value.nbytes <= _MOST_BYTES and not value.dtype.hasobject:
        state.arrays.append((label, value, value.tobytes()))
    else:
        state.risks[label] = "a large numpy array: a write into it is not noticed"


def _add_buffer(state: ReadState, value: Any, label: str, place: Place) -> None:
    with memoryview(value) as view:
        size = view.nbytes
    if size > _MOST_BYTES:
        state.risks[label] = f"a large {type(value).__name__}: a write into it is not noticed"
        return
    state.add_row(_bytes_of, value)
    state.add(f"bytes of {label}", *_bytes_of(value), place)


def _bytes_of(buffer: Any) -> tuple[bytes]:
    """Return the bytes of a buffer. The view is closed at once: while a view lives, the buffer cannot be resized."""
    with memoryview(buffer) as view:
        return (view.tobytes(),)


def _members(container: Iterable[Any]) -> tuple[frozenset[int]]:
    """Return the ids of the members, or of keys and values, which are not kept alive."""
    pairs = container.items() if isinstance(container, Mapping) else ((one,) for one in container)
    return (frozenset(hash(tuple(map(id, pair))) for pair in pairs),)


def _pairs(mapping: Mapping[Any, Any]) -> tuple[Any, ...]:
    return (*mapping.keys(), *mapping.values())


def _referent(reference: Any) -> Any:
    """Return the target of a weak reference or proxy; None if it no longer exists."""
    if isinstance(reference, weakref.ref):
        return reference()
    try:
        return reference.__repr__.__self__
    except ReferenceError:
        return None


def _referent_id(reference: Any) -> tuple[int]:
    return (id(_referent(reference)),)
