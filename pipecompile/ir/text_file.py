"""Text forms in files: `save` writes one, and says by an error of ours why it cannot.

save_text("/tmp", text)     path='/tmp' cannot be written: Is a directory
"""

from __future__ import annotations

from pathlib import Path

from pipecompile.errors import InputError
from pipecompile.ir.input_checks import file_path

__all__ = ["save_text"]


def save_text(path: str | Path, text: str) -> None:
    """Write a text to a file. Raise InputError if it is no path, or cannot be written."""
    file = file_path("path", path)
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        hint = "a file in a folder that there is"
        raise InputError(f"path={str(file)!r} cannot be written: {error.strerror or error}", hint=hint) from None
