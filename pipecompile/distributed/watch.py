"""A thread that glances at the board for a line, as long as there is one."""

from __future__ import annotations

import weakref
from threading import Thread
from time import sleep
from typing import Protocol

__all__ = ["POLL", "watch"]

POLL = 0.5
"""Seconds between two glances."""


class Watched(Protocol):
    """What is to be done at every glance."""

    def glance(self) -> None: ...


def watch(line: Watched) -> None:
    """Begin; the thread ends when nobody else knows the line."""
    Thread(target=_watch, args=(weakref.ref(line),), name="pipecompile-watch", daemon=True).start()


def _watch(line: weakref.ref[Watched]) -> None:
    while (watched := line()) is not None:
        watched.glance()
        del watched
        sleep(POLL)
