"""Watchdog: warns when a run in one thread makes no progress, and names the instruction.

    run_inline   ... 0F0 1F0 2F0 ──────────────────────►
    checks                       ▲ at 2F0    ▲ still at 2F0: one warning

The watchdog's thread reads the position from Python's own frames, so a run spends nothing on it. With a thread per device
the caller waits for the threads and checks their positions (worker_threads.py).
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from threading import Thread
from time import sleep
from types import CodeType, FrameType

__all__ = ["PATIENCE", "Watchdog", "warn_stalled"]

PATIENCE = 60.0
"""Seconds without progress after which a step counts as stalled. Longer than any cell of the benchmarks takes."""


def warn_stalled(where: str) -> None:
    """Warn that a step makes no progress."""
    text = f"the step has stood still for {PATIENCE:.3g} s: {where}"
    warnings.warn(f"{text}. Ctrl-C ends it and leaves the pipeline usable", RuntimeWarning, stacklevel=3)


class Watchdog:
    """Watches all calls of one function. `describe` maps the frame of a call to a key of the call and a phrase for its position."""

    def __init__(self, code: CodeType, describe: Callable[[FrameType], tuple[object, str]]) -> None:
        self.code, self.describe = code, describe
        self.thread: Thread | None = None
        self._seen, self._warned = set[tuple[object, str]](), set[tuple[object, str]]()

    def start(self) -> None:
        """Start the thread."""
        self.thread = Thread(target=self._watch, name="pipecompile-watchdog", daemon=True)
        self.thread.start()

    def check(self) -> None:
        """Warn, once each, of calls that are where they were at the last check."""
        now = set(map(self.describe, self._calls()))
        stalled = now & self._seen
        for _, where in stalled - self._warned:
            warn_stalled(where)
        self._seen, self._warned = now, stalled

    def _watch(self) -> None:
        while True:
            sleep(PATIENCE)
            self.check()

    def _calls(self) -> Iterator[FrameType]:
        for top in sys._current_frames().values():
            frame: FrameType | None = top
            while frame is not None:
                if frame.f_code is self.code:
                    yield frame
                frame = frame.f_back
