"""Places in the user's own files: the line of a call or of an exception."""

from __future__ import annotations

import linecache
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from types import FrameType, TracebackType

import torch

__all__ = [
    "called_by_user",
    "caller",
    "folder_prefixes",
    "frames",
    "is_foreign",
    "is_users",
    "line_of",
    "muted",
    "place_of",
    "raiser",
    "warn",
]

_LIBRARIES = frozenset(sys.stdlib_module_names) | {"sympy", "numpy"}


def folder_prefixes(folder: Path) -> tuple[str, ...]:
    """Return a folder as its files are named, and resolved: a frame has the first form, also behind a symbolic link."""
    return tuple({str(folder) + os.sep, str(folder.resolve()) + os.sep})


_FOREIGN = (*folder_prefixes(Path(torch.__file__).parent), *folder_prefixes(Path(__file__).parents[1]), "<")


def is_foreign(frame: FrameType) -> bool:
    """Return whether a frame runs code of torch or of this package."""
    return frame.f_code.co_filename.startswith(_FOREIGN)


def place_of(frame: FrameType, line: int) -> str:
    """Return a line of the function that a frame runs, as "file:line in function"."""
    return f"{frame.f_code.co_filename}:{line} in {frame.f_code.co_qualname}"


def called_by_user() -> bool:
    """Return whether the caller of this function's caller is user code: not torch, this package or a library."""
    return is_users(sys._getframe(2))


def is_users(frame: FrameType) -> bool:
    """Return whether a frame runs user code: not of torch, this package or a library of numbers."""
    return not is_foreign(frame) and frame.f_globals.get("__name__", "").partition(".")[0] not in _LIBRARIES


def caller() -> str:
    """Return the innermost frame that is not of torch or this package, as "file:line in function"; "" if there is none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if not is_foreign(frame):
            return place_of(frame, frame.f_lineno)
        frame = frame.f_back
    return ""


_is_muted: ContextVar[bool] = ContextVar("warnings of recordings are muted", default=False)


@contextmanager
def muted() -> Iterator[None]:
    """Give no warnings inside the block: a function is recorded to be analysed, and runs as it is."""
    token = _is_muted.set(True)
    try:
        yield
    finally:
        _is_muted.reset(token)


def warn(message: str, category: type[Warning]) -> None:
    """Give a warning at the innermost line that is not of torch, this package, the command line or a `with`."""
    if _is_muted.get():
        return
    frame, level = sys._getframe(1), 2
    while (is_foreign(frame) or frame.f_globals.get("__name__", "").startswith(_AROUND)) and frame.f_back:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)


_AROUND = "click.", "typer.", "contextlib"


def raiser(error: BaseException) -> str:
    """Return the innermost user line that an exception passed through, with its source text; "" if none."""
    place = ""
    for frame, line in frames(error):
        if not is_foreign(frame):
            place = _with_text(frame, line)
    return place


def frames(error: BaseException) -> Iterator[tuple[FrameType, int]]:
    """Yield the frames that an exception passed through, outermost first, and the line in each."""
    step: TracebackType | None = error.__traceback__
    while step is not None:
        yield step.tb_frame, step.tb_lineno
        step = step.tb_next


def _with_text(frame: FrameType, line: int) -> str:
    text = linecache.getline(frame.f_code.co_filename, line).strip()
    return f"{place_of(frame, line)}:  {text}"


def line_of(place: str) -> str:
    """Return a place as `caller` returns it, without the directories of its file, for tables and labels."""
    head, _, rest = place.rpartition("/")
    return rest if head else place
