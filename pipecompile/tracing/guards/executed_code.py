"""The user's code that runs while a model is recorded, also where no name leads to it.

    handlers[kind](h)     a function in a table that another module fills
    Mode.TRAIN.scale()    a method of an enumeration
    eval("gain * 2")      code that has no function

Python calls the profile function of the thread for every call, or under a user profiler its trace function. It is off inside
calls of torch, where nearly all calls are made, so that a recording takes as long as before. If a profiler has the one and a debugger
the other, nothing is noted, and a warning says so.
"""

from __future__ import annotations

import gc
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import CodeType, FrameType, FunctionType, TracebackType
from typing import Any, Self

from pipecompile.errors import RecordingWarning
from pipecompile.tracing.guards.named_attributes import WITH_TORCH
from pipecompile.tracing.user_source import warn

__all__ = ["ExecutedCode", "functions_of", "source_of", "without_variables"]


_MESSENGERS = {id(code) for code in (logging.Logger.handle.__code__, logging.Logger.makeRecord.__code__)}
"""Ids of code that calls handlers of messages, which compute nothing of the model."""

_BOTH_TAKEN = (
    "a profiler and a debugger are active while the model is recorded: a change of what code reads that no name leads to, as of a global in a"
    " function from a table, goes unnoticed in later steps. Try compile and the first step without one of them"
)


class ExecutedCode:
    """A context in which calls of this thread are noted: `scopes` has (code, globals) by the id of the code."""

    def __init__(self) -> None:
        self.scopes: dict[int, tuple[CodeType, dict[str, Any]]] = {}
        self.off = _Off(self._note)
        self._known: dict[int, CodeType] = {}  # keeps code alive, so that its id is not used again
        self._messenger: FrameType | None = None
        self._collects = False

    def __enter__(self) -> Self:
        self.off.install = _free_hook()
        if self.off.install is None:
            warn(_BOTH_TAKEN, RecordingWarning)
        else:
            self._collects = gc.isenabled()
            gc.disable()  # a collection runs finalizers and callbacks, which are not code of the model
            self.off.install(self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.off.install is not None:
            self.off.install(None)
            self.off.install = None
            if self._collects:
                gc.enable()

    def _note(self, frame: FrameType, event: str, _: Any) -> Any:
        """Note a call. As a trace function it returns itself where it waits for the end of the call."""
        if self._messenger is not None:
            if event == "return" and frame is self._messenger:
                self._messenger = None
            return self._note if frame is self._messenger else None
        code = frame.f_code
        if event != "call" or id(code) in self._known:
            return None
        if id(code) in _MESSENGERS:
            self._messenger = frame
            return self._note
        self._known[id(code)] = code
        if str(frame.f_globals.get("__name__", "")).partition(".")[0] not in WITH_TORCH:
            self.scopes[id(code)] = code, frame.f_globals
        return None


def _free_hook() -> Callable[[Any], None] | None:
    """Return what installs a function that Python calls for every call of this thread, None if all are in use."""
    if sys.getprofile() is None:
        return sys.setprofile
    return sys.settrace if sys.gettrace() is None else None


class _Off:
    """A context that may be entered again inside itself, and in which nothing is noted. `install` is None while nothing is."""

    def __init__(self, note: Any) -> None:
        self._note, self._depth = note, 0
        self.install: Callable[[Any], None] | None = None

    def __enter__(self) -> None:
        if self.install is not None and not self._depth:
            self.install(None)
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if self.install is not None and not self._depth:
            self.install(self._note)


def functions_of(ran: Iterable[tuple[CodeType, Mapping[str, Any]]]) -> Iterator[FunctionType]:
    """Yield the functions that have one of these codes, which ran with these globals, and still exist.

    The memory is looked through only for code to whose function its own name does not lead. Objects that the script has frozen
    (`gc.freeze()`, as before a fork) are unfrozen then, or they would not be found.
    """
    wanted = []
    for code, scope in ran:
        if (function := _named(code, scope)) is not None:
            yield function
        else:
            wanted.append(code)
    if wanted:
        gc.unfreeze()
    for one in gc.get_referrers(*wanted) if wanted else ():
        if isinstance(one, FunctionType) and any(one.__code__ is code for code in wanted):
            yield one


def _named(code: CodeType, scope: Mapping[str, Any]) -> FunctionType | None:
    """Return the function of a code that is found by its qualified name."""
    first, *path = code.co_qualname.split(".")
    value = scope.get(first)
    for name in path:
        value = vars(value).get(name) if isinstance(value, type) else None
    if isinstance(value, (staticmethod, classmethod)):
        value = value.__func__
    return value if isinstance(value, FunctionType) and value.__code__ is code else None


def source_of(code: CodeType) -> tuple[str, int, str]:
    """Return the place where code is written. The rewritten code that runs during a recording has the place of the original."""
    return code.co_filename, code.co_firstlineno, code.co_qualname


def without_variables(code: CodeType) -> CodeType:
    """Return code that makes a function without a closure; it is never run."""
    return code.replace(co_freevars=()) if code.co_freevars else code
