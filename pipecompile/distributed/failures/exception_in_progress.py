"""The exception that the main thread of this process is handling for a while, which others learn if this rank is late.

try:
    for x in loader: ...           ValueError: bad record
finally:
    dist.barrier()                 waits for the other ranks, which wait for this one in a step
"""

from __future__ import annotations

import sys
from threading import main_thread
from typing import Any

from pipecompile.errors import described

__all__ = ["LongHandling"]


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
