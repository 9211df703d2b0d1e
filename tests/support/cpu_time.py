"""CPU time of a piece of code, without the garbage collections of the process around it."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable


def assert_within(limit: float, run: Callable[[], object], attempts: int = 3) -> None:
    """Fail if code takes a number of seconds of CPU or more in each attempt.

    A collection of the whole process of the tests costs up to a second, and a neighbour on the machine doubles every time.
    """
    times: list[float] = []
    while len(times) < attempts and (not times or times[-1] >= limit):
        times.append(seconds(run))
    assert min(times) < limit, times


def seconds(run: Callable[[], object]) -> float:
    """Return the CPU seconds of a call of code."""
    collects = gc.isenabled()
    gc.disable()
    start = time.process_time()
    try:
        run()
        return time.process_time() - start
    finally:
        if collects:
            gc.enable()
