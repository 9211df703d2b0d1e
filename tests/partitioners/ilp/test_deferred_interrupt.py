"""Ctrl-C while a solver runs is recorded, ends the solver, and leaves the handler as it was."""

from __future__ import annotations

import os
import signal
from math import inf

from partitioners.ilp.test_solver_backend import hard


def test_ctrl_c_keeps_the_incumbent():
    mip, off = hard()
    pressed: list[float] = []
    before = signal.getsignal(signal.SIGINT)

    def press(value: float, _bound: float) -> None:
        """Press Ctrl-C at the first incumbent."""
        if value < inf and not pressed:
            pressed.append(value)
            os.kill(os.getpid(), signal.SIGINT)

    outcome = mip.minimise(off, 60.0, callback=press)
    assert outcome.is_interrupted
    assert outcome.values is not None
    assert signal.getsignal(signal.SIGINT) is before
