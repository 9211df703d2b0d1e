"""Errors of signal handlers, told from the errors of the calls that they interrupt.

signal.alarm(60); handler raises TimeoutError      a call of the loss that only measures drops errors of the loss, and not this one
SIGCHLD: a worker of a DataLoader was killed       RuntimeError out of a wait for another rank: no sign of a lost connection
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import current_thread, main_thread
from typing import Any

__all__ = ["is_from_handler", "signal_errors_kept"]


@contextmanager
def signal_errors_kept() -> Iterator[None]:
    """Raise at the end of the block what a signal handler has raised within."""
    handlers = _handlers() if current_thread() is main_thread() else {}
    if not handlers:
        yield
        return
    raised: list[Exception] = []
    noting = {number: _noting(handler, raised) for number, handler in handlers.items()}
    for number, handler in noting.items():
        signal.signal(number, handler)
    try:
        yield
    finally:
        for number, handler in noting.items():
            if signal.getsignal(number) is handler:
                signal.signal(number, handlers[number])
        if raised:
            raise raised[0]


def _handlers() -> dict[int, Callable[[int, Any], Any]]:
    """Return the signal handlers in Python. That of Ctrl-C raises what no call drops."""
    found = {number: signal.getsignal(number) for number in signal.valid_signals()}
    return {number: one for number, one in found.items() if callable(one) and one is not signal.default_int_handler}


def _noting(handler: Callable[[int, Any], Any], raised: list[Exception]) -> Callable[[int, Any], Any]:
    """Return the handler that notes what it raises."""

    def noting(number: int, frame: Any) -> Any:
        try:
            return handler(number, frame)
        except Exception as error:
            raised.append(error)
            raise

    return noting


_OWN = ("pipecompile.", "torch.")
_HANDLERS = ("torch.utils.data.",)
"""Modules of torch whose handlers raise: that of a DataLoader, for a worker that was killed."""


def is_from_handler(error: BaseException) -> bool:
    """Return whether Python code of a signal handler raised an exception, and not torch or this package in the call that waited."""
    step = error.__traceback__
    while step is not None and step.tb_next is not None:
        step = step.tb_next
    module = "" if step is None else str(step.tb_frame.f_globals.get("__name__", ""))
    return bool(module) and (module.startswith(_HANDLERS) or not module.startswith(_OWN))
