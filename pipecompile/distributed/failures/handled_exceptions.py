"""Exceptions that a script handles: the first one is the failure that other ranks have to know.

try:
    for x in loader: ...           ValueError: bad record
finally:
    dist.barrier()                 RuntimeError: Timed out ..., while ValueError: bad record was being handled

`with_handled` describes the pair once the script has ended. `LongHandling` sees the first one while the barrier still waits for other
ranks, which wait for this rank in a step.
"""

from __future__ import annotations

import sys
from threading import main_thread
from typing import Any

from pipecompile.errors import described, encodable
from pipecompile.tracing.user_source import is_users

__all__ = ["LongHandling", "with_handled"]


def with_handled(error: BaseException, text: str = "") -> str:
    """Return an exception, described by `text` or by itself, with the first one that was being handled in user code."""
    text = text or described(error)
    if not isinstance(error, Exception):  # Ctrl-C says enough
        return encodable(text)
    first = _first(error)
    return encodable(text if first is None else f"{text}, while {described(first)} was being handled")


def _first(error: BaseException) -> BaseException | None:
    """Return the earliest exception in whose `except` or `finally` this one came, of those that were caught in a user frame."""
    first, seen = None, {id(error)}
    while (before := error.__cause__ or (None if error.__suppress_context__ else error.__context__)) is not None:
        if id(before) in seen:
            break
        seen.add(id(before))
        trace = before.__traceback__
        if error.__cause__ is None and trace is not None and is_users(trace.tb_frame):
            first = before
        error = before
    return first


class LongHandling:
    """The exceptions that the main thread handles, as another thread sees them, which looks at them now and then."""

    def __init__(self) -> None:
        self._seen = self._told = 0

    def news(self) -> str | None:
        """Return the exception that is being handled as it was at the last look, "" if there is none any more; None for no news."""
        error, before, told = _handled(), self._seen, self._told
        self._seen = 0 if error is None else id(error)  # not the exception itself: its frames hold tensors
        self._told = self._seen if self._seen == before else 0
        if self._told == told:
            return None
        return "" if error is None or not self._told else described(error)


def _handled() -> BaseException | None:
    exceptions: dict[int | None, Any] = getattr(sys, "_current_exceptions", dict)()  # of CPython
    found = exceptions.get(main_thread().ident)
    error: BaseException | None = found[1] if isinstance(found, tuple) else found  # a triple until Python 3.11
    return error
