"""A thread that glances at the board for every watched there is. It ends before the interpreter does: a thread that Python stops
inside c10d takes the process with it.
"""

from __future__ import annotations

import atexit
from threading import Event, Thread
from typing import Protocol
from weakref import WeakSet

__all__ = ["POLL", "watch"]

POLL = 0.5
"""Seconds between two glances."""

_AT_MOST = 10.0
"""Seconds that the end of the interpreter waits for a glance."""


class Watched(Protocol):
    """What is to be done at every glance."""

    def glance(self) -> None: ...


_WATCHED: WeakSet[Watched] = WeakSet()
_THREADS: list[Thread] = []
_ENDED = Event()


def watch(watched: Watched) -> None:
    """From now on, for as long as somebody else knows the communicator."""
    _WATCHED.add(watched)
    if not _THREADS:
        _THREADS.append(Thread(target=_watch, name="pipecompile-watch", daemon=True))
        _THREADS[0].start()
        atexit.register(_end)


def _watch() -> None:
    while not _ENDED.wait(POLL):
        for watched in list(_WATCHED):
            watched.glance()
            del watched


def _end() -> None:
    _ENDED.set()
    _THREADS[0].join(_AT_MOST)
