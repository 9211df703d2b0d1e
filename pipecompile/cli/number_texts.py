"""Options that are numbers, as typed: sizes with units, lists with commas, and a file of bandwidths.

--memory-limit 16GiB,8GiB       bytes
--bandwidth 16GB                bytes per second; links.csv: a row per device, an entry per device
--speeds 1,0.5                  numbers
"""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pipecompile.errors import InputError
from pipecompile.text.units import counted, parse_bytes

__all__ = ["bandwidths", "numbers", "sizes"]


def numbers(option: str, text: str, kind: Callable[[str], Any]) -> list[Any]:
    """Return the numbers of a text with commas. Raise InputError."""
    try:
        return [kind(part) for part in text.split(",")]
    except ValueError:
        what = "whole numbers" if kind is int else "numbers"
        raise InputError(f"{option} {text!r} is not a list of {what}", hint=f"{option} 2,1,1") from None


def sizes(option: str, text: str) -> float | list[float]:
    """Return bytes, or bytes per device. Raise InputError."""
    found: list[float] = [_bytes(f"{option} {text}", part) for part in text.split(",")]
    return found if len(found) > 1 else found[0]


def bandwidths(option: str, text: str) -> float | list[list[float]]:
    """Return bytes per second: one number, or a row per device of a .csv file. Raise InputError."""
    if not text.endswith(".csv"):
        return _bytes(f"{option} {text}", text.removesuffix("/s"))
    hint = "a line per device with an entry per device: 0,16GB and 16GB,0 for two"
    try:
        with Path(text).open(newline="", encoding="utf-8-sig") as file:
            rows = [(number, row) for number, row in enumerate(csv.reader(file), 1) if row]
    except (OSError, ValueError, csv.Error) as error:
        why = (isinstance(error, OSError) and error.strerror) or str(error)
        raise InputError("the bandwidths cannot be read", where=text, why=why, hint=hint) from None
    if not rows:
        raise InputError(f"the file of {option} has no rows", where=text, hint=hint)
    square: list[list[float]] = [
        [_bytes(f"{text}, line {number}, entry {column}", cell) for column, cell in enumerate(row, 1)]
        for number, row in rows
    ]
    for number, row in rows:
        if len(row) != len(rows):
            what = f"a row has {counted(len(row), 'entry')} for {counted(len(rows), 'row')}"
            raise InputError(what, where=f"{text}, line {number}", hint=hint)
    return square


def _bytes(place: str, text: str) -> int:
    """Return the bytes of a text. Raise InputError with the place where it stands."""
    try:
        return parse_bytes(text)
    except InputError as error:
        raise InputError(error.what, where=place, hint=error.hint) from None
