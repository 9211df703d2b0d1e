"""The end of a process, as other ranks notice it: a process of this host that is gone, and an exception that nothing catches.

A rank that waits for an exchange reads, from the status board, which process each rank is. It looks up those of its own host, every
half second. An uncaught exception, in a data loader or an optimizer as well, is posted as the failure of its rank.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Protocol
from weakref import WeakSet

__all__ = ["has_ended", "identity", "report_uncaught"]

_START, _STATE = 19, 0
"""Places of the start time and of the state among the fields of /proc/PID/stat that follow the name of the process."""


def identity(pid: int | str = "self") -> str:
    """Return which process of which host this is, "" where the system does not say: boot, namespace, number and start time."""
    with suppress(OSError, IndexError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        number, _, rest = Path(f"/proc/{pid}/stat").read_text().partition(" ")
        fields = rest.rpartition(") ")[2].split()
        if fields[_STATE] not in "ZX":  # ended, and not collected by its parent
            return f"{boot} {Path('/proc/self/ns/pid').readlink()} {number} {fields[_START]}"
    return ""


def has_ended(process: str) -> bool:
    """Return whether a process with this `identity` has ended. False for a process of another host, and if that is not known."""
    own = identity()
    if not own or own.split()[:2] != process.split()[:2]:
        return False
    return identity(process.split()[2]) != process


class Reporting(Protocol):
    """An object that posts an exception for other ranks."""

    def report_outside(self, error: Exception) -> None: ...


_REPORTING: WeakSet[Reporting] = WeakSet()
_HOOKS: list[Callable[..., object]] = []


def report_uncaught(reporting: Reporting) -> None:
    """Post exceptions that nothing catches by an object, for as long as other code holds a reference to it."""
    _REPORTING.add(reporting)
    if sys.excepthook not in _HOOKS:
        _HOOKS.append(_reporting_before(sys.excepthook))
        sys.excepthook = _HOOKS[-1]


def _reporting_before(hook: Callable[..., object]) -> Callable[..., object]:
    """Return a hook that shows an exception by `hook`, and then posts it."""

    def report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        hook(kind, error, trace)
        if isinstance(error, Exception):
            for reporting in list(_REPORTING):
                with suppress(Exception):
                    reporting.report_outside(error)

    return report
