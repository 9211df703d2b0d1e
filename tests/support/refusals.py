"""Which values a call neither takes nor refuses by an error of ours."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

from pipecompile.errors import PipecompileError, text_of
from pipecompile.text.shown_value import shown

__all__ = ["failures"]


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in a block that computes for longer. Time in which other processes run does not count."""

    def raise_timeout(*_: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGPROF, raise_timeout)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def check(call: Callable[[], Any]) -> None:
    """Run a call that may raise an error of ours, and no other."""
    with limited(30), suppress(PipecompileError):
        call()


def failures(call: Callable[[Any], Any], values: Sequence[Any]) -> list[str]:
    """Return the values for which a call does not end, or raises an error that is none of ours."""
    found = []
    for value in values:
        try:
            check(partial(call, value))
        except Exception as error:
            found.append(f"{shown(value)}: {type(error).__name__}: {text_of(error):.200}")
    return found
