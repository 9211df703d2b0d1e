"""Text forms in files: `save` writes one, and says by an error of ours why it cannot.

load_text("a.csv", ...)     the schedule cannot be read: No such file or directory
save_text("/tmp", text)     path='/tmp' cannot be written: Is a directory
named_file("a.csv")         where row 1 (line 2) becomes where a.csv, row 1 (line 2)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pipecompile.errors import InputError, PipecompileError, ScheduleError
from pipecompile.text.input_checks import file_path

__all__ = ["cause_of", "load_text", "named_file", "save_text"]


def cause_of(error: OSError | UnicodeDecodeError) -> str:
    """Return why a file cannot be read or written, without its path: "No such file or directory"."""
    return (isinstance(error, OSError) and error.strerror) or str(error)


def load_text(path: Path, noun: str, kind: type[PipecompileError], hint: str) -> str:
    """Return the text of a file. Raise `kind` if the file, which holds a `noun`, cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise kind(f"the {noun} cannot be read", where=str(path), why=cause_of(error), hint=hint) from None


def save_text(path: str | Path, text: str) -> None:
    """Write a text to a file. Raise InputError if it is not a path, or cannot be written."""
    file = file_path("path", path)
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        hint = "a file in a folder that there is"
        raise InputError(f"path={str(file)!r} cannot be written: {cause_of(error)}", hint=hint) from None


@contextmanager
def named_file(path: str | Path) -> Iterator[None]:
    """Put the file in front of the place that a ScheduleError of a block names: the block reads the text of the file."""
    try:
        yield
    except ScheduleError as error:
        where = f"{path}, {error.where}" if error.where else str(path)
        raise ScheduleError(error.what, where=where, why=error.why, hint=error.hint) from None
