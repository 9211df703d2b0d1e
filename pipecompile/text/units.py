"""Units for display: one unit for a whole column, so that its digits line up; and the parser of sizes."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from pipecompile.errors import InputError

__all__ = ["BYTES", "COUNT", "FLOPS", "SECONDS", "Unit", "counted", "fit", "parse_bytes", "written"]


@dataclass(frozen=True, slots=True)
class Unit:
    """A unit with its `name`, its `size` in base units (seconds, bytes, items), and `whole` if it has no fractions."""

    name: str
    size: float
    whole: bool = False

    def format(self, value: float, like: float | None = None) -> str:
        """Return the value with three digits and no exponent: 0.042, 4.20, 42.0, 4,200. Zero is "0".

        With `like`, use as many decimals as that number needs, so that the digits of a column line up.
        """
        if not value:
            return "0"
        scale = abs(value if like is None else like) / self.size
        digits = 0 if self.whole else 3 + (scale < 0.1) - len(f"{min(scale, 100.0):.0f}")
        return f"{value / self.size:,.{digits}f}"


SECONDS = (Unit("s", 1.0), Unit("ms", 1e-3), Unit("µs", 1e-6), Unit("ns", 1e-9))
BYTES = (
    Unit("TiB", 2.0**40),
    Unit("GiB", 2.0**30),
    Unit("MiB", 2.0**20),
    Unit("KiB", 2.0**10),
    Unit("B", 1.0, whole=True),
)
FLOPS = (Unit("T", 1e12), Unit("G", 1e9), Unit("M", 1e6), Unit("k", 1e3), Unit("", 1.0, whole=True))
COUNT = (Unit("B", 1e9), Unit("M", 1e6), Unit("k", 1e3), Unit("", 1.0, whole=True))


def fit(scale: tuple[Unit, ...], values: Iterable[float]) -> Unit:
    """Return the largest unit in which the largest of `values` is at least 1; the smallest unit if all are zero."""
    top = max(map(abs, values), default=0.0)
    return next((unit for unit in scale if top >= unit.size), scale[-1])


def written(scale: tuple[Unit, ...], value: float) -> str:
    """Return one value with its own unit: `12.3 ms`."""
    unit = fit(scale, (value,))
    return f"{unit.format(value)} {unit.name}".rstrip()


_MOST_EXACT = 10**15
"""Whole numbers below are written with all digits."""


def counted(count: float, noun: str) -> str:
    """Return the count with its noun in the singular or plural: `1 stage`, `2 stages`, `0.5 micro-batches`."""
    plural = (
        f"{noun[:-1]}ies" if noun.endswith("ry") else f"{noun}es" if noun.endswith(("ch", "s", "x")) else f"{noun}s"
    )
    try:
        number = str(count) if isinstance(count, int) and count < _MOST_EXACT else f"{count:.6g}"
    except OverflowError:  # a whole number beyond all floats
        number = "more than 1e308"
    return f"{number} {noun if count == 1 else plural}"


_SIZE = re.compile(r"\s*(\d+(?:\.\d*)?(?:e\d+)?)\s*(?:([kmgt]?)(i?)b?)\s*", re.IGNORECASE)


_MOST_BYTES = 1e30
"""Far more than any machine has; larger numbers overflow."""


def parse_bytes(text: str) -> int:
    """Return the number of bytes of `2GiB`, `512 MB`, `1.5g` or `1e9`. Raise InputError for other text.

    A prefix with an i counts in 1024s, a prefix without in 1000s.
    """
    match = _SIZE.fullmatch(text)
    if match is None or (match[3] and not match[2]):
        raise InputError(
            f"{text!r} is not a size", hint="write a number with KiB, MiB, GiB, TiB, or kB, MB, GB, TB: 2GiB"
        )
    base = 1024 if match[3] else 1000
    number = float(match[1])
    if number > _MOST_BYTES:
        raise InputError(f"{text!r} is more than any device has", hint="2GiB")
    return int(number * base ** ("kmgt".index(match[2].lower()) + 1 if match[2] else 0))
