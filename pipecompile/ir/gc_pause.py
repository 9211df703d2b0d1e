"""A pause for the garbage collector while millions of objects are made that all stay: it would look at each of them again and
again, and find nothing. A program for 64 devices and 1,024 micro-batches is lowered and verified twice as fast.
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
    """The same function; while it runs no garbage is collected, unless that is off anyway."""

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
