"""Checks of single arguments, and the groups of options whose fields name their checks.

A check returns the value in its canonical form, or raises an error that names the argument.

    n_stages=0 is not a whole number of at least 1          the argument, its value, and which values are accepted
      where  entry 2: 'x'                                   of a sequence or a mapping, which entry
      try    n_stages=4                                     text to paste

A check accepts its own result, so options can be checked again after a change. NumPy's numbers count as numbers and become
Python's; a bool is not a number.

    n_stages: Annotated[int, whole_number(4)]               in a `Group`: checked whenever a group is constructed or replaced
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import inf
from numbers import Integral, Real
from typing import Any, get_type_hints

import numpy as np

from pipecompile.errors import InputError, PipecompileError
from pipecompile.text.input_checks import LARGEST_OPTION, OVERFLOW, float_of, near, size_fault
from pipecompile.text.shown_value import shown

__all__ = [
    "Check",
    "Group",
    "checks_of",
    "choice",
    "entries",
    "flag",
    "function",
    "number",
    "refusal",
    "whole_number",
]


Check = Callable[[str, Any], Any]
"""(name of the argument, value) to the value in canonical form. Raises a PipecompileError."""


def refusal(
    name: str, value: object, expected: str, *, where: str = "", why: str = "", hint: str = "",
    kind: type[PipecompileError] = InputError,
) -> PipecompileError:  # fmt: skip
    """Return the error that refuses `value`: "{name}={value} is not {expected}"."""
    return kind(f"{name}={shown(value)} is not {expected}", where=where, why=why, hint=hint)


def whole_number(example: int, *others: object, least: int = 1, most: int | None = None) -> Check:
    """Return the check of a whole number from `least` to `most`, or of one of `others`. `example` is what the hint proposes."""
    expected = f"a whole number of at least {least}"
    accepted = ", ".join(repr(other) for other in others if other is not None)

    def check(name: str, value: Any) -> Any:
        if value is None or isinstance(value, str):
            if value in others:
                return value
        elif isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= least:
            if most is None or int(value) <= most:
                return int(value)
            raise InputError(f"{name}={shown(value)} is more than {most:,}", hint=f"{name}={example}")
        hint = f"{name}={example}" + (f", or {name}={accepted}" if accepted else "")
        raise refusal(name, value, f"{expected}, nor {accepted}" if accepted else expected, hint=hint)

    return check


def number(example: float, *, zero: bool = False, finite: bool = True) -> Check:
    """Return the check of a number above 0, or from 0 if `zero`. It must be finite if `finite`, and of a size that can be computed with."""
    expected = ("a finite number" if finite else "a number") + (" of at least 0" if zero else " above 0")

    def check(name: str, value: Any) -> float:
        if isinstance(value, Real) and not isinstance(value, bool):
            size = float_of(value)
            if (size > 0 or (zero and size == 0)) and not (finite and size == inf):
                if fault := size_fault(size, LARGEST_OPTION, zero=zero):
                    raise InputError(f"{name}={shown(value)} is {fault}", why=OVERFLOW, hint=f"{name}={example:g}")
                return int(value) if isinstance(value, Integral) and size != inf else size
        raise refusal(name, value, expected, hint=f"{name}={example:g}")

    return check


def choice(*known: str | None) -> Check:
    """Return the check of one of several names."""
    names = [name for name in known if name is not None]
    listing = ", ".join(map(repr, known))

    def check(name: str, value: Any) -> Any:
        if any(value is one or (isinstance(value, str) and value == one) for one in known):
            return value
        hint = f"{name}={near(value, names)!r}"
        raise InputError(f"{name}={shown(value)} is not known", why=f"known are {listing}", hint=hint)

    return check


def flag(name: str, value: Any) -> bool:
    """Return a bool. Raise InputError for any other value, NumPy's bool excepted."""
    if isinstance(value, (bool, np.bool_)):
        return bool(value)
    raise refusal(name, value, "True or False", hint=f"{name}=True")


def function(example: str) -> Check:
    """Return the check of a function or None."""

    def check(name: str, value: Any) -> Any:
        if isinstance(value, type) and hasattr(value, "forward"):
            raise refusal(name, value, "a function, but a class", hint=f"{name}={value.__name__}()")
        if value is not None and not callable(value):
            raise refusal(name, value, "a function", hint=f"{name}={example}")
        return value

    return check


def entries(
    name: str, value: Any, check: Check, expected: str, hint: str, places: Sequence[object] | None = None
) -> tuple[Any, ...]:
    """Return the entries of a sequence, each checked. Raise InputError that names the first entry that is refused, by its place."""
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
        raise refusal(name, value, expected, hint=hint)
    try:
        values, canonical = tuple(value), list[Any]()
    except TypeError:  # a tensor without dimensions
        raise refusal(name, value, expected, hint=hint) from None
    for place, entry in enumerate(values):
        try:
            canonical.append(check(name, entry))
        except InputError as error:
            where = f"entry {place if places is None else shown(places[place])}: {shown(entry)}"
            if error.why == OVERFLOW:
                raise InputError(error.what, where=where, why=error.why, hint=hint) from None
            whole = values if places is None else dict(zip(places, values, strict=True))
            raise refusal(name, whole, expected, where=where, hint=hint) from None
    return tuple(canonical)


@dataclass(frozen=True, kw_only=True)
class Group:
    """Base of the groups. Construction runs the check of every field and keeps its result."""

    def __post_init__(self) -> None:
        for name, check in checks_of(type(self)).items():  # type: ignore[arg-type]
            object.__setattr__(self, name, check(name, getattr(self, name)))


@cache
def checks_of(kind: type[Any]) -> dict[str, Check]:
    """Return the check of every field that has one, by name."""
    hints = get_type_hints(kind, include_extras=True)
    return {name: hint.__metadata__[0] for name, hint in hints.items() if hasattr(hint, "__metadata__")}
