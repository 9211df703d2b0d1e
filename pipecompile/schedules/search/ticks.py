"""Ticks: seconds or bytes as whole numbers, for a solver of whole numbers.

0.5, 1.5, 2.0     are 1, 3 and 4 ticks of 0.5: exact
0.31, 1.7         have no simple common divisor: a small part of the longest amount is a tick, and amounts are rounded down
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import ceil, floor, inf, lcm

__all__ = ["Tick"]

_DENOMINATORS = 64
"""Largest denominator for which durations are tried as multiples of a common tick."""


@dataclass(frozen=True, slots=True)
class Tick:
    """The seconds (or bytes) of a tick. `is_exact`: all amounts are whole ticks."""

    size: float
    is_exact: bool

    @classmethod
    def of(cls, amounts: Sequence[float], most: float, count: int) -> Tick:
        """Return a common divisor of `amounts` if there is a simple one, else `most` / `count`."""
        positive = sorted({amount for amount in amounts if 0 < amount < inf})
        if positive:
            ratios = [Fraction(amount / positive[0]).limit_denominator(_DENOMINATORS) for amount in positive]
            least = lcm(*(ratio.denominator for ratio in ratios))
            size = positive[0] / least
            is_close = all(abs(float(r) * positive[0] - a) <= 1e-12 * a for r, a in zip(ratios, positive, strict=True))
            if is_close and most / size <= count:
                return cls(size, is_exact=True)
        return cls(max(most, 1e-300) / count, is_exact=False)

    def down(self, amount: float) -> int:
        """Return the whole ticks in `amount`."""
        return floor(amount / self.size * (1 + 1e-12) + 1e-9)

    def most(self, capacity: float) -> int:
        """Return the ticks that may fit in a capacity: all that do, and none too few by rounding."""
        return floor(capacity / self.size * (1 + 1e-9)) if self.is_exact else self.up(capacity)

    def up(self, amount: float) -> int:
        """Return the least whole ticks that cover `amount`."""
        return ceil(amount / self.size * (1 - 1e-12) - 1e-9)
