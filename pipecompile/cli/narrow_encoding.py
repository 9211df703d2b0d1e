"""Output where stdout and stderr are closed, or where their encoding lacks characters of tables, as ASCII does without a locale."""

from __future__ import annotations

import codecs
import io
import os
import sys
from pathlib import Path
from typing import TextIO

__all__ = ["print_what_can_be_encoded"]

_ERRORS = "pipecompile.nearest"

_NEAREST = {
    "─": "-", "━": "-", "│": "|", "├": "+", "┘": "+", "┐": "+", "▶": ">", "►": ">", "→": "->",
    "·": "-", "…": "...", "µ": "u", "\N{MULTIPLICATION SIGN}": "x", "≤": "<=", "≥": ">=",
}  # fmt: skip


def print_what_can_be_encoded() -> None:
    """Make stdout and stderr write the nearest ASCII text for what their encoding lacks, and nothing if the shell has closed them."""
    sys.stdout, sys.stderr = sys.stdout or _nothing(), sys.stderr or _nothing()
    codecs.register_error(_ERRORS, _nearest)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors in ("strict", "surrogateescape"):
            stream.reconfigure(errors=_ERRORS)


def _nothing() -> TextIO:
    return Path(os.devnull).open("w", encoding="utf-8")


def _nearest(error: UnicodeError) -> tuple[str | bytes, int]:
    """Return the nearest ASCII text of what cannot be encoded, and where to go on. Bytes of a path that are not text stay the same."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    text = error.object[error.start : error.end]
    if any("\udc80" <= character <= "\udcff" for character in text):
        first = text[0]
        is_byte = "\udc80" <= first <= "\udcff"
        return first.encode("ascii", "surrogateescape") if is_byte else _NEAREST.get(first, "?"), error.start + 1
    return "".join(_NEAREST.get(character, "?") for character in text), error.end
