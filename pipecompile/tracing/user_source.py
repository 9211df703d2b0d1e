"""Where in the user's own file a call came from."""

from __future__ import annotations

import linecache
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType, TracebackType

import torch

__all__ = ["called_by_user", "caller", "frames", "is_foreign", "line_of", "raiser"]

_OURS = str(Path(__file__).resolve().parents[1]) + os.sep
_LIBRARIES = frozenset(sys.stdlib_module_names) | {"sympy", "numpy"}
_TORCH = str(Path(torch.__file__).resolve().parent) + os.sep


def is_foreign(frame: FrameType) -> bool:
    """Is that torch's code, or ours?"""
    name = frame.f_code.co_filename
    return name.startswith((_TORCH, _OURS, "<"))


def _describe(frame: FrameType, line: int) -> str:
    return f"{frame.f_code.co_filename}:{line} in {frame.f_code.co_qualname}"


def called_by_user() -> bool:
    """Was the function that asks this called from a line that is neither torch's, ours, nor of Python's own library?"""
    frame = sys._getframe(2)
    return not is_foreign(frame) and frame.f_globals.get("__name__", "").partition(".")[0] not in _LIBRARIES


def caller() -> str:
    """The innermost frame on the stack that is neither torch's nor ours, as "file:line in function"."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if not is_foreign(frame):
            return _describe(frame, frame.f_lineno)
        frame = frame.f_back
    return ""


def raiser(error: BaseException) -> str:
    """The innermost line of the user's that an exception passed through, with its source text."""
    found = ""
    for frame, line in frames(error):
        if not is_foreign(frame):
            found = _with_text(frame, line)
    return found


def frames(error: BaseException) -> Iterator[tuple[FrameType, int]]:
    """The frames that an exception passed through, outermost first, and the line in each."""
    step: TracebackType | None = error.__traceback__
    while step is not None:
        yield step.tb_frame, step.tb_lineno
        step = step.tb_next


def _with_text(frame: FrameType, line: int) -> str:
    text = linecache.getline(frame.f_code.co_filename, line).strip()
    return f"{_describe(frame, line)}:  {text}"


def line_of(place: str) -> str:
    """`place` (as `caller` gives it) with its file's directories dropped, for tables and labels."""
    head, _, rest = place.rpartition("/")
    return rest if head else place
