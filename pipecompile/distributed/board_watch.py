"""A daemon thread that checks, for every communicator of the process, whether its current wait can still end.

The thread ends before the interpreter does: Python would stop it inside c10d otherwise, and the process would abort.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable
from dataclasses import dataclass
from threading import Event, Thread
from time import monotonic, sleep
from typing import Protocol
from weakref import WeakSet

__all__ = ["POLL", "PendingWait", "await_report", "watch"]

POLL = 0.5
"""Seconds between two checks. A failure elsewhere is noticed after at most twice this time."""

_EXIT_TIMEOUT = 10.0
"""Seconds that the end of the interpreter waits for a check that is under way."""


@dataclass(frozen=True, slots=True, eq=False)
class PendingWait:
    """A wait for value `name`, to or from `peer`, since the time `since` of the monotonic clock, in seconds."""

    peer: int
    name: str
    since: float


class Waiting(Protocol):
    """An object whose current wait is checked."""

    def check_wait(self) -> None: ...


_WATCHED: WeakSet[Waiting] = WeakSet()
_THREADS: list[Thread] = []
_ENDED = Event()


def watch(waiting: Waiting) -> None:
    """Check the waits of an object every `POLL` seconds for as long as other code holds a reference to it."""
    _WATCHED.add(waiting)
    if not _THREADS:
        _THREADS.append(Thread(target=_check_all, name="pipecompile-watch", daemon=True))
        _THREADS[0].start()
        atexit.register(_end)


def await_report(check: Callable[[], None], seconds: float, pause: float = POLL) -> None:
    """Call `check` for so many seconds, with pauses of so many, since other ranks may know more. It raises what they report."""
    end = monotonic() + seconds
    while monotonic() < end:
        check()
        sleep(pause)


def _check_all() -> None:
    while not _ENDED.wait(POLL):
        for waiting in list(_WATCHED):
            waiting.check_wait()
            del waiting


def _end() -> None:
    _ENDED.set()
    _THREADS[0].join(_EXIT_TIMEOUT)
