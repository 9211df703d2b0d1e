"""A daemon thread that checks, for every communicator of the process, whether its current wait can still end.

The thread ends before the interpreter does: Python would stop it inside c10d otherwise, and the process would abort. No thread
survives a fork, so a forked process begins without one.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import inf
from threading import Event, Lock, Thread, get_ident, main_thread
from threading import enumerate as enumerate_threads
from time import monotonic, sleep
from typing import Protocol
from weakref import WeakSet

from pipecompile.distributed.failures.handled_exceptions import LongHandling
from pipecompile.distributed.failures.interrupts import Interrupts

__all__ = ["PATIENCE", "POLL", "PendingWait", "at_handling", "at_main_end", "await_report", "has_ended", "watch"]

POLL = 0.5
"""Seconds between two checks. A failure elsewhere is noticed after at most twice this time."""

PATIENCE = 4 * POLL
"""Seconds that a rank waits for a report by other ranks, which know more, or for a message under way, before it reports a rank itself."""

_EXIT_TIMEOUT = 10.0
"""Seconds that the end of the interpreter waits for a check that is under way."""


@dataclass(slots=True, eq=False)
class PendingWait:
    """A wait of a thread for value `name`, to or from `peer`. `since` is the time of `awake` at the first check, in seconds."""

    peer: int
    name: str
    thread: int = field(default_factory=get_ident)
    since: float = inf


class Waiting(Protocol):
    """An object whose current wait is checked, and is ended by Ctrl-C."""

    def check_wait(self) -> None: ...

    def interrupt(self) -> None: ...


class Noting(Protocol):
    """An object that notes which exception the main thread handles, "" for none."""

    def note_handling(self, error: str) -> None: ...


_AT_HANDLING: WeakSet[Noting] = WeakSet()
_AT_MAIN_END: list[Callable[[Sequence[str]], object]] = []
_WATCHED: WeakSet[Waiting] = WeakSet()
_THREADS: list[Thread] = []
_INTERRUPTS: list[Interrupts] = []
_ENDED = Event()
_STARTING = [Lock()]


def watch(waiting: Waiting) -> None:
    """Check the waits of an object every `POLL` seconds for as long as other code holds a reference to it."""
    _WATCHED.add(waiting)
    with _STARTING[0]:  # pipelines may be compiled in several threads
        if not _THREADS:
            _INTERRUPTS.append(Interrupts())
            thread = Thread(target=_check_all, args=_INTERRUPTS, name="pipecompile-watch", daemon=True)
            thread.start()
            _THREADS.append(thread)


def at_main_end(call: Callable[[Sequence[str]], object]) -> None:
    """Call this with the names of the threads that keep the process, once its main thread has ended and they run on."""
    _AT_MAIN_END.append(call)


def at_handling(noting: Noting) -> None:
    """Let an object note which exception the main thread handles for a while, for as long as other code holds a reference to it."""
    _AT_HANDLING.add(noting)


def await_report(check: Callable[[], None], seconds: float, pause: float = POLL) -> None:
    """Call `check` for `seconds` seconds, with pauses of `pause` seconds, since other ranks may know more. It raises what they report."""
    end = monotonic() + seconds
    while monotonic() < end:
        check()
        sleep(pause)


def has_ended() -> bool:
    """Return whether the interpreter is about to end: waits are not checked any more."""
    return _ENDED.is_set()


def _check_all(interrupts: Interrupts) -> None:
    handling = LongHandling()
    while not _ENDED.is_set():
        is_interrupted = interrupts.wait(POLL)
        for waiting in list(_WATCHED):
            waiting.interrupt() if is_interrupted else waiting.check_wait()
            del waiting
        if (error := handling.news()) is not None:
            for noting in list(_AT_HANDLING):
                noting.note_handling(error)
        if _AT_MAIN_END and not main_thread().is_alive():
            _note_main_end()


def _note_main_end() -> None:
    names = [thread.name for thread in enumerate_threads() if thread is not main_thread() and not thread.daemon]
    while names and _AT_MAIN_END:
        with suppress(RuntimeError):  # of the store
            _AT_MAIN_END.pop()(names)


def _end() -> None:
    _ENDED.set()
    for interrupts, thread in zip(_INTERRUPTS, _THREADS, strict=True):
        interrupts.wake()
        thread.join(_EXIT_TIMEOUT)


def _begin_child() -> None:
    _STARTING[:] = [Lock()]  # another thread may have held the one before
    _WATCHED.clear()
    _AT_HANDLING.clear()
    _AT_MAIN_END.clear()
    _THREADS.clear()
    while _INTERRUPTS:
        _INTERRUPTS.pop().leave()


atexit.register(_end)  # at the import: what a script registers later runs earlier
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_child)
