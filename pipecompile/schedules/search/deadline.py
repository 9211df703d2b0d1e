"""Deadline of a search: steps that would end after it are not begun.

0 ──── catalogue ──── 0.6 ── list schedules ── 0.8 ── swaps ── 0.9 ── exact ── 1        shares of the time limit
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter

__all__ = ["Deadline"]


class Deadline:
    """A limit of `seconds` from now on. `longest` is the longest step so far, in seconds.

    `is_interrupted` says that Ctrl-C has moved the deadline to now.
    """

    def __init__(self, seconds: float) -> None:
        self.start, self.seconds = perf_counter(), seconds
        self.longest = 0.0
        self.noted = self.start
        self.is_interrupted = False

    @property
    def left(self) -> float:
        """Seconds until the deadline; negative after it."""
        return self.start + self.seconds - perf_counter()

    def note(self) -> None:
        """Note the end of a step: all since the last one was a step."""
        now = perf_counter()
        self.longest, self.noted = max(self.longest, now - self.noted), now

    def allows(self, share: float, steps: float = 1.0) -> bool:
        """Return whether `steps` steps, each like the longest, end within this share of the time."""
        return perf_counter() + steps * self.longest <= self.start + share * self.seconds

    def interrupt(self) -> None:
        """Move the deadline to now."""
        self.seconds, self.is_interrupted = perf_counter() - self.start, True

    @contextmanager
    def moved_by_interrupt(self) -> Iterator[None]:
        """Let Ctrl-C end the block, and move the deadline to now, instead of raising KeyboardInterrupt."""
        try:
            yield
        except KeyboardInterrupt:
            self.interrupt()
