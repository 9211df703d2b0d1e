"""Checks of typed paths, and of the folder of `--out`, before the work whose result goes there.

--out ''          an unset variable of the shell: not the present folder
--plan ''         the same of a file, which is not a file without a name
--out /proc/x     the folder may be written, and yet takes no file
--out a.txt/x     no folder can be there, which is an error before a model is loaded
"""

from __future__ import annotations

import os
from pathlib import Path
from tempfile import TemporaryFile

import typer

from pipecompile.errors import InputError

__all__ = ["check_folder", "file_of", "folder_of"]


def folder_of(text: str) -> Path:
    """Return the path that was typed. Raise typer.BadParameter for an empty one."""
    if not text:
        raise typer.BadParameter("'' is not a directory; a variable of the shell may be unset")
    return Path(text)


def file_of(text: str) -> Path:
    """Return the path of a file that was typed. Raise typer.BadParameter for an empty one."""
    if not text:
        raise typer.BadParameter("'' is not a file; a variable of the shell may be unset")
    return Path(text)


def check_folder(folder: Path) -> None:
    """Raise InputError if no files can be written there: it is a file, is below one, or may not be written."""
    try:
        os.fsencode(folder)
        if folder.is_file():
            raise InputError(
                f"--out {str(folder)!r} is a file, not a directory", hint=f"--out {folder.with_suffix('')}.out"
            )
        there = next(path for path in (folder, *folder.absolute().parents) if os.path.lexists(path))
        why = "" if there.is_dir() else f"{str(there)!r} is not a directory"
        if not why and not os.access(there, os.W_OK | os.X_OK):
            why = f"{str(there)!r} may not be written"
        if not why:
            TemporaryFile(dir=there).close()  # a file without a name, or one that is gone at once
    except (OSError, ValueError) as error:  # a name that is too long, or that no file system can write
        why = str(error)
    if why:
        raise InputError(f"--out {str(folder)!r} cannot be written", why=why, hint="--out out")
