"""Checks of the numbers and texts that enter a public function, and names that are near a mistyped one.

    whole("n_microbatches", 0)                  refused: n_microbatches=0 is not a whole number of at least 1
    amount("effort", math.nan)                  refused: effort=nan is not a finite number of at least 0
    amounts("forward", [1, None], 2, "stage")   refused, with the entry: one number for all, or one per stage
    file_path("path", None)                     refused: path=None is not a path
    checked_count(999_999, 4, "micro-batches")  refused: a text of 4 items cannot have so many micro-batches

NumPy's numbers count as numbers and become Python's. A bool is not a number.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from math import inf
from numbers import Integral, Real
from pathlib import Path
from typing import TypeVar

from pipecompile.errors import InputError, ScheduleError
from pipecompile.text.shown_value import shown, type_text
from pipecompile.text.units import counted

Text = TypeVar("Text", str, bytes, str | bytes)

__all__ = [
    "FEW",
    "LARGEST",
    "LARGEST_OPTION",
    "OVERFLOW",
    "amount",
    "amounts",
    "check_kind",
    "checked_count",
    "file_path",
    "float_of",
    "json_text",
    "known_names",
    "near",
    "place_text",
    "size_fault",
    "whole",
    "without_mark",
]

FEW = 1000
"""Count of stages or micro-batches up to which a text may have fewer items than its header says, and is read all the same:
its verifier reports what is missing. Work that is linear in this count takes milliseconds."""


LARGEST = 1e100
"""The largest finite amount, of seconds, bytes or bytes per second; the smallest is one over it. Sums and quotients of such stay finite."""

OVERFLOW = "sums or quotients of such numbers are not finite"
"""Why a number is refused that is too large, or too near to 0."""

LARGEST_OPTION = 1e40
"""The largest finite number of an option of `compile`; the smallest is one over it. Products and quotients of two such are amounts."""

_LONGEST_NAME, _LONGEST_PATH = 255, 4095
"""Bytes of the name of a file and of a path, on every usual file system."""


def float_of(value: Real) -> float:
    """Return a number as a float; infinity for a whole number beyond all floats."""
    try:
        return float(value)
    except OverflowError:
        return inf if value > 0 else -inf  # type: ignore[operator]


def whole(name: str, value: object, least: int = 1, most: int | None = None) -> int:
    """Return a whole number of at least `least`, and at most `most` if it is given. Raise InputError that names the argument."""
    if isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= least:
        if most is None or int(value) <= most:
            return int(value)
        raise InputError(f"{name}={shown(value)} is more than {most:,}", hint=f"{name}={max(least, 4)}")
    raise InputError(f"{name}={shown(value)} is not a whole number of at least {least}", hint=f"{name}={max(least, 4)}")


def amount(name: str, value: object, *, zero: bool = True, finite: bool = True, largest: float = LARGEST) -> float:
    """Return a number above 0, or from 0 if `zero`, up to `largest`. It must be finite if `finite`. Raise InputError that names the
    argument.
    """
    if isinstance(value, Real) and not isinstance(value, bool):
        number = float_of(value)
        if (number > 0 or (zero and number == 0)) and not (finite and number == inf):
            if fault := size_fault(number, largest, zero=zero):
                raise InputError(f"{name}={shown(value)} is {fault}", why=OVERFLOW, hint=f"{name}=1.0")
            return number
    kind = "a finite number" if finite else "a number"
    limit = "of at least 0" if zero else "above 0"
    raise InputError(f"{name}={shown(value)} is not {kind} {limit}", hint=f"{name}=1.0")


def size_fault(number: float, largest: float, *, zero: bool) -> str:
    """Return "more than 1e+40" for a finite number above `largest`, "less than 1e-40" for one below one over it if `zero` is no number
    either; else "".
    """
    if largest < number < inf:
        return f"more than {largest:g}"
    return f"less than {1 / largest:g}" if not zero and number < 1 / largest else ""


def amounts(name: str, value: object, count: int, noun: str, *, finite: bool = True) -> tuple[float, ...]:
    """Return `count` numbers of at least 0: the entries of a sequence, or one number for all. Raise InputError, with the entry."""
    if isinstance(value, Real) and not isinstance(value, bool):
        return (amount(name, value, finite=finite),) * count
    hint = f"one number, or one per {noun}"
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise InputError(f"{name}={shown(value)} is not a number, nor one per {noun}", hint=hint)
    try:
        numbers = tuple(value)
    except TypeError:  # a tensor without dimensions
        raise InputError(f"{name}={shown(value)} is not a number, nor one per {noun}", hint=hint) from None
    if len(numbers) != count:
        raise InputError(f"{name} has {counted(len(numbers), 'number')} for {counted(count, noun)}", hint=hint)
    return tuple(amount(f"{name}[{index}]", number, finite=finite) for index, number in enumerate(numbers))


def near(name: object, known: Iterable[str]) -> str:
    """Return the known name that is most like a mistyped one, whatever its case; the first known name if none is like it."""
    names = {one.lower(): one for one in reversed(list(known))}
    text = name.lower() if isinstance(name, str) else ""
    return names[(get_close_matches(text, names, n=1, cutoff=0.5) or list(names)[-1:])[0]]


def known_names(what: str, names: Iterable[object], known: Iterable[str]) -> None:
    """Raise InputError for the first of `names` that is not known, with the known name that is most like it."""
    expected = list(known)
    for name in names:
        if not isinstance(name, str) or name not in expected:
            close = get_close_matches(str(name), expected, n=1) if isinstance(name, str) else []
            hint = close[0] if close else ""
            raise InputError(
                f"{what} {shown(name)} is not known", why=f"known are {', '.join(expected) or 'none'}", hint=hint
            )


def check_kind(value: object, kind: type, hint: str) -> None:
    """Raise InputError unless `value` is a `kind`."""
    if not isinstance(value, kind):
        raise InputError(f"{type_text(value)} is not a {kind.__name__}", hint=hint)


def file_path(name: str, value: object) -> Path:
    """Return the path of a file or folder. Raise InputError that names the argument, also for a name that no file can have."""
    try:
        path = Path(value)  # type: ignore[arg-type]
        written = os.fsencode(path)
    except Exception:  # no path, or a text that no file system can write
        raise InputError(f"{name}={shown(value)} is not a path", hint=f'{name}="out"') from None
    if b"\0" in written:
        raise InputError(f"{name}={shown(value)} is not a path", why="it has a character 0", hint=f'{name}="out"')
    if len(written) > _LONGEST_PATH or any(len(os.fsencode(part)) > _LONGEST_NAME for part in path.parts):
        why = f"a name has at most {_LONGEST_NAME} bytes, a path {_LONGEST_PATH:,}"
        raise InputError(f"{name}={shown(value)} is too long for a path", why=why, hint=f'{name}="out"')
    return path


def place_text(value: object) -> str:
    """Return the text of a place that a message names: a text, or the path of a file. Raise InputError."""
    if isinstance(value, str | os.PathLike):
        return str(value)
    raise InputError(f"where={shown(value)} is not text", hint='where="plan.json"')


def checked_count(count: int, n_items: int, plural: str) -> int:
    """Return the count of stages or micro-batches of a text with `n_items` actions or instructions. Each takes at least one.

    Raise ScheduleError for a count that no such text can have. So no later step allocates or loops for a number in a header.
    """
    if count > max(n_items, FEW):
        raise ScheduleError(
            f"the text has {counted(n_items, 'action')} and cannot have {count:,} {plural}",
            why="every stage runs an action of every micro-batch",
        )
    return count


def json_text(value: object) -> str | bytes:
    """Return a text of JSON without the byte-order mark that some editors put first. Raise InputError if it is not a text."""
    if not isinstance(value, str | bytes):
        raise InputError(f"{type_text(value)} is not JSON text", hint="Path(path).read_text()")
    return without_mark(value)


def without_mark(text: Text) -> Text:
    """Return the text without the byte-order mark that some editors put first."""
    return text.removeprefix("\ufeff") if isinstance(text, str) else text.removeprefix(b"\xef\xbb\xbf")
