"""Ctrl-C while the main thread waits inside c10d: Python raises KeyboardInterrupt when the wait is over, so the wait is ended.

    SIGINT ──► pipe of `signal.set_wakeup_fd` ──► watch thread breaks the connections ──► the wait ends ──► KeyboardInterrupt

Signals with handlers of the user's own do not end waits: a handler may only note that the script is to save and stop.
"""

from __future__ import annotations

import os
import signal
from select import select
from threading import current_thread, main_thread

__all__ = ["Interrupts"]


class Interrupts:
    """The signals of this process, as another thread than the main one notices them.

    Signals are not seen if another thread than the main one creates it, or if other code (asyncio) has the wakeup descriptor.
    """

    def __init__(self) -> None:
        self._reading, self._writing = os.pipe()
        os.set_blocking(self._reading, False)
        os.set_blocking(self._writing, False)
        if current_thread() is main_thread():
            before = signal.set_wakeup_fd(self._writing, warn_on_full_buffer=False)
            if before != -1:
                signal.set_wakeup_fd(before)

    def wait(self, seconds: float) -> bool:
        """Wait for Ctrl-C that Python will raise as KeyboardInterrupt, at most `seconds` seconds. Return whether it came."""
        readable, _, _ = select([self._reading], [], [], seconds)
        came = os.read(self._reading, 4096) if readable else b""
        return signal.SIGINT in came and signal.getsignal(signal.SIGINT) is signal.default_int_handler

    def wake(self) -> None:
        """End a wait of another thread."""
        os.write(self._writing, b"\0")

    def leave(self) -> None:
        """Drop the pipe in a forked process: its signals are not those of the process that made the pipe."""
        if current_thread() is main_thread() and (before := signal.set_wakeup_fd(-1)) not in (-1, self._writing):
            signal.set_wakeup_fd(before)
        os.close(self._reading)
        os.close(self._writing)
