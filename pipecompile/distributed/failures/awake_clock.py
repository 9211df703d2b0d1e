"""A clock for waits: it stands still while the computer sleeps, or while this process is stopped, say in a debugger."""

from __future__ import annotations

from threading import Lock
from time import monotonic

__all__ = ["AwakeClock", "awake"]

_LONGEST = 2.0
"""Seconds between two readings that count at most. A rank that waits reads the clock every half second."""


class AwakeClock:
    """Seconds in which this process ran, as far as readings show it: after a longer pause the others have not been late."""

    def __init__(self) -> None:
        self._last, self._seconds, self._lock = monotonic(), 0.0, Lock()

    def __call__(self) -> float:
        """Return the time in seconds."""
        with self._lock:
            now = monotonic()
            self._seconds += min(now - self._last, _LONGEST)
            self._last = now
            return self._seconds


awake = AwakeClock()
"""The clock of this process."""
