"""Plain user functions as pieces: functions of a module's file that the forward of the whole model calls.

mask = padding_mask(lengths)            in the forward of the whole model there is no smaller module or method: `padding_mask` is the piece

A piece is found by the frames that an exception passed through. Its calls are intercepted by name: wherever a loaded module has the
function under a name, the name stands for the handler inside the block.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType, FunctionType
from typing import Any

from pipecompile.tracing.user_source import is_users

__all__ = ["function_name", "function_of", "functions_replaced"]


def function_name(frame: FrameType) -> str:
    """Return "module:name" of the plain function that a frame runs; "" if it is not a user function that its module names."""
    found = frame.f_globals.get(frame.f_code.co_name)
    module = frame.f_globals.get("__name__", "")
    is_of_module = vars(sys.modules.get(module, sys)) is frame.f_globals
    if not isinstance(found, FunctionType) or not is_of_module or not is_users(frame):
        return ""
    code = getattr(inspect.unwrap(found), "__code__", None)
    is_found = code is not None and _place(code) == _place(frame.f_code)
    return f"{module}:{frame.f_code.co_name}" if is_found else ""


def function_of(name: str) -> Callable[..., Any]:
    """Return the function of a name that `function_name` gave."""
    module, _, function = name.partition(":")
    found: Callable[..., Any] = vars(sys.modules[module])[function]
    return found


def _place(code: CodeType) -> tuple[str, int]:
    """Return where a code was written; while a model is recorded, functions run rewritten codes."""
    return code.co_filename, code.co_firstlineno


@contextmanager
def functions_replaced(replacements: Iterable[tuple[Callable[..., Any], Callable[..., Any]]]) -> Iterator[None]:
    """Replace each first function by the second under all names that loaded modules have for it, inside the block."""
    pairs = {id(old): (old, new) for old, new in replacements}
    places: list[tuple[dict[str, Any], str, Any]] = []
    if pairs:
        spaces = [vars(module) for module in list(sys.modules.values()) if hasattr(module, "__dict__")]
        naming = [space for space in spaces if not pairs.keys().isdisjoint(map(id, list(space.values())))]
        places = [(space, key, value) for space in naming for key, value in list(space.items()) if id(value) in pairs]
    try:
        for space, key, value in places:
            space[key] = pairs[id(value)][1]
        yield
    finally:
        for space, key, value in places:
            space[key] = value
