"""Copies of a stage in threads: one computes at a time."""

from __future__ import annotations

import threading
import time
from typing import Any

import pipecompile as pc
from pipecompile.ir import Action, Kind
from pipecompile.passes import lower
from pipecompile.runtime.cells.stage_locks import StageLocks
from pipecompile.runtime.registers import Frame

PROGRAM = lower(pc.build_schedule("chimera", 2, 4))


def _most_at_once(locks: StageLocks, stages: tuple[int, int]) -> int:
    """Return how many of two actions in two threads, of these stages, compute at the same time."""
    inside, most = [0], [0]

    def compute(_frame: Frame) -> None:
        inside[0] += 1
        most[0] = max(most[0], inside[0])
        time.sleep(0.05)
        inside[0] -= 1

    runs = [locks.around(compute, Action(stage, Kind.FORWARD, m)) for m, stage in enumerate(stages)]
    threads = [threading.Thread(target=run, args=(Frame([], []),)) for run in runs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return most[0]


def test_copies_of_a_stage_wait_for_each_other() -> None:
    assert _most_at_once(StageLocks(PROGRAM, threaded=True), (0, 0)) == 1
    assert _most_at_once(StageLocks(PROGRAM, threaded=True), (0, 1)) == 2


def test_others_have_no_lock() -> None:
    def run(_frame: Frame) -> Any:
        return None

    for locks in (
        StageLocks(PROGRAM, threaded=False),
        StageLocks(lower(pc.build_schedule("1f1b", 2, 4)), threaded=True),
    ):
        assert locks.around(run, Action(0, Kind.FORWARD, 0)) is run
