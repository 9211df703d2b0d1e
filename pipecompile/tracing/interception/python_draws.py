"""Draws of random numbers by Python while a model is recorded: from `random`, `numpy.random` and generator objects.

    if random.random() > 0.2: x = layer(x)        ──►   PC116 at this line, which the piece around it makes an opaque node

Such a draw is no call of torch, so its value would be a constant of the recording. A recording notices that the state of a
generator is another at its end. Only then it runs again, with Python's trace function, to find the line.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from pipecompile.errors import TraceError
from pipecompile.tracing.state.random_states import RandomStates
from pipecompile.tracing.user_source import is_users, place_of

__all__ = ["draw_refused", "draws_located", "python_draws"]


def python_draws(states: RandomStates) -> tuple[str, ...]:
    """Return the generators that Python has drawn from; draws of torch are nodes."""
    return states.of_python().changed()


def draw_refused(states: RandomStates, place: str = "") -> TraceError:
    """Return the error for a draw at this place."""
    return TraceError(code="PC116", where=place, why=f"it draws from {' and '.join(python_draws(states))}, and would be a constant of the recording")  # fmt: skip


@contextmanager
def draws_located(states: RandomStates) -> Iterator[None]:
    """Raise TraceError PC116 in the user's function whose line changes one of the states inside the block."""
    before = sys.gettrace()
    sys.settrace(_Locator(states).enter)
    try:
        yield
    finally:
        sys.settrace(before)


class _Locator:
    """A trace function: before each operation of the user's functions it looks whether a generator was drawn from.

    `drawer` is the frame that drew, and `place` its line. The error is raised when that frame goes on: an error raised while a
    function returns would not have its frame in the traceback, by which the piece is found.
    """

    def __init__(self, states: RandomStates) -> None:
        self.states = states.of_python()
        self.drawer: FrameType | None = None
        self.place = ""

    def enter(self, frame: FrameType, event: str, _: Any) -> Any:
        if event != "call" or not is_users(frame):
            return None
        self._look(_users_caller(frame))
        frame.f_trace_opcodes = True
        return self.step

    def step(self, frame: FrameType, event: str, _: Any) -> Any:
        if event == "opcode":
            self._look(frame)
            if self.drawer is frame:
                sys.settrace(None)
                raise draw_refused(self.states, self.place)
        return self.step

    def _look(self, frame: FrameType | None) -> None:
        if self.drawer is None and frame is not None and python_draws(self.states):
            self.drawer, self.place = frame, place_of(frame, frame.f_lineno)


def _users_caller(frame: FrameType) -> FrameType | None:
    """Return the innermost frame of the user's around a frame."""
    outer = frame.f_back
    while outer is not None and not is_users(outer):
        outer = outer.f_back
    return outer
