"""Jobs beside each other in lanes, where most of their time is waits.

lane 0   stall        stall, direct
lane 1   stall, copies
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

from tests.distributed.faults import FORK

__all__ = ["in_lanes"]


def in_lanes(job: Callable[[str], Any], *lanes: Sequence[str]) -> dict[str, Any]:
    """Return what a job returns for each name. Each lane is a process forked from this one; raises EOFError if one fails."""
    started = []
    for names in lanes:
        reading, writing = FORK.Pipe(duplex=False)
        process = FORK.Process(target=_lane, args=(writing, job, names))
        process.start()
        writing.close()  # the lane has the only one, so that its end is noticed
        started.append((process, reading))
    found: dict[str, Any] = {}
    for process, reading in started:
        found |= reading.recv()
        process.join()
    return found


def _lane(line: Connection, job: Callable[[str], Any], names: Sequence[str]) -> None:
    line.send({name: job(name) for name in names})
