"""Locks of stages with several copies: threads that run copies of a stage share its parameters, buffers and code.

thread 0   0F0 ─── 1F1 (waits) ─── 1F1
thread 1   1F0 ───────────────┘             one copy of stage 1 computes at a time
"""

from __future__ import annotations

from threading import Lock

from pipecompile.ir import Action, Program
from pipecompile.runtime.registers import Frame, Run

__all__ = ["StageLocks"]


class StageLocks:
    """A lock per stage of a program with several directions, if each device has a thread; no locks for others."""

    def __init__(self, program: Program, *, threaded: bool) -> None:
        self._locks = [Lock() for _ in program.placement] if program.directions and threaded else []

    def around(self, run: Run, action: Action) -> Run:
        """Return the function of an action, which waits while a copy of its stage computes."""
        if not self._locks:
            return run
        lock = self._locks[action.stage]

        def alone(frame: Frame) -> None:
            with lock:
                run(frame)

        return alone
