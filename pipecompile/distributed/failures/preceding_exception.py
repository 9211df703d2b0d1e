"""The exception that a script was handling when another one ended it: that is the failure which other ranks have to know.

try:
    for x in loader: ...           ValueError: bad record
finally:
    dist.barrier()                 RuntimeError: Timed out ..., while ValueError: bad record was being handled
"""

from __future__ import annotations

from pipecompile.errors import described, encodable
from pipecompile.tracing.user_source import is_users

__all__ = ["with_handled"]


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
