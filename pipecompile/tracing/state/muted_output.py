"""Output of runs that are not the user's own: what a loss or a hook prints and logs meanwhile is dropped.

    loss_fn = lambda y, t: (print("loss"), F.cross_entropy(y, t))[1]      printed once a micro-batch, not in each measurement of it

Standard error is left alone, for warnings go there, and so are the loggers of this package and that of warnings.
"""

from __future__ import annotations

import bdb
import logging
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from threading import RLock, get_ident
from typing import Any

__all__ = ["output_muted"]

_SPOKEN = {__name__.partition(".")[0], "py"}
"""Packages whose loggers are not muted; `py.warnings` is that of warnings."""

_muted: Counter[int] = Counter()
"""Number of blocks around each thread."""

_lock = RLock()


def _is_debugged() -> bool:
    """Return whether this thread is in a debugger of Python, as after `pdb.set_trace()`."""
    debugger = getattr(sys.gettrace(), "__self__", None)
    return isinstance(debugger, bdb.Bdb)


class _ThreadStream:
    """A stream that drops what muted threads write."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        return len(text) if _muted[get_ident()] and not _is_debugged() else int(self.stream.write(text))

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "stream"), name)


@contextmanager
def output_muted() -> Iterator[None]:
    """Drop what this thread prints to standard output, and logs, while the block runs."""
    thread = get_ident()
    with _lock:
        _muted[thread] += 1
        _install()
    try:
        yield
    finally:
        with _lock:
            _muted[thread] -= 1
            if not +_muted:
                _muted.clear()
                _remove()


def _install() -> None:
    if sys.stdout is not None and not isinstance(sys.stdout, _ThreadStream):
        sys.stdout = _ThreadStream(sys.stdout)
    logging.Logger.callHandlers = _call_handlers  # type: ignore[assignment,method-assign]


def _remove() -> None:
    if isinstance(sys.stdout, _ThreadStream):
        sys.stdout = sys.stdout.stream
    logging.Logger.callHandlers = _original  # type: ignore[method-assign]


_original = logging.Logger.callHandlers


def _call_handlers(logger: logging.Logger, record: logging.LogRecord) -> None:
    if not _muted[get_ident()] or record.name.partition(".")[0] in _SPOKEN:
        _original(logger, record)
