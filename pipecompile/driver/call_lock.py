"""One thread at a time calls a pipeline: a recording swaps the insides of the model's tensors, and steps share registers.

Calls within a call, such as those of a loss function, pass: workers adopt the context of their caller, and so what it is inside of.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar, Token
from functools import wraps
from threading import Lock
from typing import Any, TypeVar, cast

__all__ = ["CallLock", "exclusive"]

_Method = TypeVar("_Method", bound=Callable[..., Any])

_inside: ContextVar[tuple[CallLock, ...]] = ContextVar("inside", default=())
"""The locks of the pipelines whose calls this context is inside of, the outermost first."""


class CallLock:
    """A lock that lets calls of other threads wait, and calls within a call pass. A forked process has one of its own: the thread that
    was inside exists in the parent alone.
    """

    def __init__(self) -> None:
        self._lock, self._process = Lock(), os.getpid()

    def enter(self) -> Token[tuple[CallLock, ...]] | None:
        """Wait until no other thread is inside. Return what `leave` takes: None within a call."""
        around = _inside.get()
        if self in around:
            return None
        if self._process != os.getpid():
            self._lock, self._process = Lock(), os.getpid()
        self._lock.acquire()
        return _inside.set((*around, self))

    def leave(self, token: Token[tuple[CallLock, ...]] | None) -> None:
        """Let the next thread in, unless this was a call within a call."""
        if token is not None:
            _inside.reset(token)
            self._lock.release()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Let other threads wait in this context."""
        token = self.enter()
        try:
            yield
        finally:
            self.leave(token)


def exclusive(method: _Method) -> _Method:
    """Return a method of a pipeline that runs in one thread at a time."""

    @wraps(method)
    def alone(self: Any, *args: Any, **kwargs: Any) -> Any:
        context = self._cache.context
        with context.calls.held(), context.rebound.in_place():
            return method(self, *args, **kwargs)

    return cast(_Method, alone)
