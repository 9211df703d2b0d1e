"""Reservations of devices in every period: the reservation table of modulo scheduling.

    period 4     device 0    F0 F0 .. I0 │ F0 F0 .. I0 │ ...       [2, 3) is free, and so is [6, 7)

Rau, "Iterative Modulo Scheduling", MICRO 1994, with seconds in place of clock cycles.
"""

from __future__ import annotations

from math import floor

__all__ = ["Reservations"]

_TOLERANCE = 1e-9
"""Share of a period by which intervals may overlap: rounding."""


class Reservations:
    """The reserved intervals of each device, repeated every `period` seconds. An interval starts within the first period."""

    def __init__(self, period: float, n_devices: int) -> None:
        self.period, self.tolerance = period, _TOLERANCE * period
        self.intervals: list[list[tuple[float, float]]] = [[] for _ in range(n_devices)]

    def reserve(self, device: int, earliest: float, seconds: float) -> float | None:
        """Reserve `seconds` from the first free time at or after `earliest`, and return it; None if no period has room for them."""
        if seconds <= 0:
            return earliest
        if seconds > self.period + self.tolerance:
            return None
        start = earliest
        while (end := self._conflict(device, start, seconds)) is not None:
            start = end
            if start > earliest + self.period + self.tolerance:
                return None
        within = start - floor(start / self.period) * self.period
        self.intervals[device].append((within, within + seconds))
        return start

    def _conflict(self, device: int, start: float, seconds: float) -> float | None:
        """Return the end of a reservation that overlaps [start, start + seconds); None if it is free."""
        base = floor(start / self.period) * self.period
        first, last = start - base + self.tolerance, start - base + seconds - self.tolerance
        for begin, end in self.intervals[device]:
            for shift in (-self.period, 0.0, self.period):
                if begin + shift < last and first < end + shift:
                    return base + end + shift
        return None
