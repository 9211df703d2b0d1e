"""The end of a process, as other ranks notice it: a process of this host no longer exists, or an exception was not caught.

A rank that waits for an exchange reads the process of each rank from the status board, and looks up the processes of its own host every
half second. An uncaught exception, also of a data loader or an optimizer, is posted as the failure of its rank, and so is Ctrl-C. A script
that ends leaves a note: a process that ended without a note was killed. A forked process reports nothing.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.util import Finalize
from time import monotonic
from types import TracebackType
from typing import Protocol
from weakref import WeakSet

from pipecompile.distributed.failures import board_watch
from pipecompile.distributed.failures.handled_exceptions import with_handled
from pipecompile.errors import InputError, RunError
from pipecompile.parameters.process_identity import has_ended, identity

__all__ = ["end_of_script", "has_ended", "identity", "note_end", "note_uncaught", "report_uncaught", "require_process"]


class Reporting(Protocol):
    """An object that posts an exception for other ranks, and notes one that has ended a thread."""

    def report_outside(self, error: BaseException) -> bool: ...

    def wait_for_readers(self, error: BaseException | None = None, since: float | None = None) -> None: ...

    def note_thread(self, name: str, error: BaseException) -> None: ...


_REPORTING: WeakSet[Reporting] = WeakSet()
_HOOKS: list[Callable[..., object]] = []
_NOTES_OF_ERRORS: list[Callable[[BaseException], object]] = []
_NOTES: list[Callable[[str], object]] = []


def report_uncaught(reporting: Reporting) -> None:
    """Post exceptions that nothing catches by an object, for as long as other code holds a reference to it."""
    _REPORTING.add(reporting)
    if sys.excepthook not in _HOOKS:
        _HOOKS.append(_reporting_before(sys.excepthook))
        sys.excepthook = _HOOKS[-1]
    if threading.excepthook not in _HOOKS:
        _HOOKS.append(_noting_before(threading.excepthook))
        threading.excepthook = _HOOKS[-1]


def _reporting_before(hook: Callable[..., object]) -> Callable[..., object]:
    """Return a hook that shows an exception by `hook`, and then posts it.

    All pipelines post before one waits: ranks that wait for each other in different orders would do so until the limit, per pipeline.
    """

    def report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        hook(kind, error, trace)
        for note in _NOTES_OF_ERRORS:
            note(error)
        if isinstance(error, (Exception, KeyboardInterrupt)):
            start, unread = monotonic(), [each for each in list(_REPORTING) if _is_posted(each, error)]
            for reporting in unread:
                with suppress(Exception):
                    reporting.wait_for_readers(error, start)

    return report


def _is_posted(reporting: Reporting, error: BaseException) -> bool:
    """Post an exception. Return whether others have to read it."""
    with suppress(Exception):
        return reporting.report_outside(error)
    return False


def _noting_before(hook: Callable[..., object]) -> Callable[..., object]:
    """Return a hook of threads that shows an exception by `hook`, and then notes it."""

    def note(arguments: threading.ExceptHookArgs) -> None:
        hook(arguments)
        if isinstance(arguments.exc_value, Exception):
            name = "" if arguments.thread is None else arguments.thread.name
            for reporting in list(_REPORTING):
                with suppress(Exception):
                    reporting.note_thread(name, arguments.exc_value)

    return note


def note_end(note: Callable[[str], object]) -> None:
    """Call `note` with the reason when the script of this process ends, in a process of `multiprocessing` as well."""
    if not _NOTES:
        Finalize(None, _note, exitpriority=0)
    _NOTES.append(note)


def note_uncaught(note: Callable[[BaseException], object]) -> None:
    """Call `note` with an exception that ends the script, before this rank waits for others to read of it."""
    _NOTES_OF_ERRORS.append(note)


def end_of_script(error: BaseException | None = None) -> str:
    """Return how the script ends that is at its end now, or ends by an `error`."""
    error = error or sys.exc_info()[1] or _shown()
    return "its script has ended" if error is None else f"its script has ended by {with_handled(error)}"


def _note() -> None:
    reason = end_of_script()
    for note in _NOTES:
        with suppress(Exception):
            note(reason)


def _shown() -> BaseException | None:
    """Return the exception that has ended the script, as Python keeps it, whichever hook has shown it. A prompt has one of an
    earlier line.
    """
    return None if hasattr(sys, "ps1") else getattr(sys, "last_value", None)


def require_process(pid: int, rank: int) -> None:
    """Raise InputError in a process forked from rank `rank`, which is process `pid`; RunError while the interpreter ends."""
    if os.getpid() != pid:
        raise InputError(
            f"a pipeline of rank {rank} is called in a process forked from it",
            where=f"process {os.getpid()}, forked from {pid}",
            why="the connections to the other ranks are those of the process that compiled the pipeline",
            hint="the call in the process of the rank; in a DataLoader's worker or a child, load pipe.full_state_dict() into a model",
        )
    if board_watch.has_ended():
        raise RunError(
            f"a pipeline of rank {rank} is called while the interpreter ends",
            stage=None,
            microbatch=0,
            why="no rank can notice any more that another one has failed",
            hint="the call at the end of the script, not in an atexit handler that is older than `import pipecompile`",
        )


def _begin_child() -> None:
    _REPORTING.clear()
    _NOTES.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_child)
