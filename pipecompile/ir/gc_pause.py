"""A decorator that disables garbage collection while millions of long-lived objects are allocated.

The collector would scan these objects repeatedly and free none. Without it, lowering and verifying a program for 64
devices and 1,024 micro-batches take half the time.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

__all__ = ["without_collection"]

P = ParamSpec("P")
R = TypeVar("R")


def without_collection(function: Callable[P, R]) -> Callable[P, R]:
    """Return `function` with garbage collection disabled during its calls, if it is enabled at the call."""

    @wraps(function)
    def paused(*args: P.args, **kwargs: P.kwargs) -> R:
        if not gc.isenabled():
            return function(*args, **kwargs)
        gc.disable()
        try:
            return function(*args, **kwargs)
        finally:
            gc.enable()

    return paused
