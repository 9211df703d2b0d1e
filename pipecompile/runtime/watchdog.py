"""Who stands still in one thread, and where: a thread that glances now and then at what runs inline.

    run_inline   ... 0F0 1F0 2F0 ──────────────────────►
    glances                      ▲ at 2F0    ▲ at 2F0 still: told once

It reads the position from Python's own frames, so a run does nothing for it. With a thread per device the caller waits, and looks itself.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from threading import Thread
from time import sleep
from types import CodeType, FrameType

__all__ = ["PATIENCE", "Watchdog", "told"]

PATIENCE = 60.0
"""Seconds in which a step comes no further, until that is told."""


def told(where: str) -> None:
    """Warn that a step stands still."""
    text = f"the step has stood still for {PATIENCE:.3g} s: {where}"
    warnings.warn(f"{text}. Ctrl-C ends it and leaves the pipeline usable", RuntimeWarning, stacklevel=3)


class Watchdog:
    """Watches all calls of one function: `describe` says of the frame of a call which one it is, and where."""

    def __init__(self, code: CodeType, describe: Callable[[FrameType], tuple[object, str]]) -> None:
        self.code, self.describe = code, describe
        self._seen, self._told = set[tuple[object, str]](), set[tuple[object, str]]()
        self._thread: Thread | None = None

    def start(self) -> None:
        """The thread, if it does not run yet."""
        if self._thread is None or not self._thread.is_alive():  # none does after a fork
            self._thread = Thread(target=self._watch, name="pipecompile-watchdog", daemon=True)
            self._thread.start()

    def glance(self) -> None:
        """Tell of calls that are where they were at the last glance, once."""
        now = set(map(self.describe, self._calls()))
        still = now & self._seen
        for _, where in still - self._told:
            told(where)
        self._seen, self._told = now, still

    def _watch(self) -> None:
        while True:
            sleep(PATIENCE)
            self.glance()

    def _calls(self) -> Iterator[FrameType]:
        for top in sys._current_frames().values():
            frame: FrameType | None = top
            while frame is not None:
                if frame.f_code is self.code:
                    yield frame
                frame = frame.f_back
