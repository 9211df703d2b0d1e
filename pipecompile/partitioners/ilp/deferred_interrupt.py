"""Ctrl-C while a solver runs, which cannot raise it: recorded, for the solver to end and its caller to raise."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["deferred_interrupt"]


@contextmanager
def deferred_interrupt() -> Iterator[list[bool]]:
    """Record Ctrl-C in a list instead of raising it inside the solver, which cannot raise it. Only in the main thread."""
    interrupts: list[bool] = []
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGINT) is None:
        yield interrupts
        return
    before = signal.signal(signal.SIGINT, lambda *_: interrupts.append(True))
    try:
        yield interrupts
    finally:
        signal.signal(signal.SIGINT, before)
