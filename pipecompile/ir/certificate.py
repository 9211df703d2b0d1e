"""Certificates: how far a schedule is at most from the best, and who proved it.

step 24 │ lower bound 22.5 │ gap 6.2%           no schedule takes less than 22.5 seconds under the same costs and memory
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Certificate", "relative_gap"]

_ROUNDING = 1e-4
"""Gap up to which a schedule counts as optimal: an exact proof computes in whole ticks and rounds durations down."""


def relative_gap(seconds: float, bound: float) -> float:
    """Return the share of `seconds` by which a schedule may be longer than the best, given a lower bound in seconds."""
    return max(0.0, (seconds - bound) / seconds) if seconds else 0.0


@dataclass(frozen=True, slots=True)
class Certificate:
    """A lower `bound` in seconds on every schedule of a problem, of which one takes `seconds`.

    `is_exact`: the exact back end was asked, not the closed bounds alone. `costs` is the fingerprint of costs and routes: under
    others the bound says nothing.
    """

    seconds: float
    bound: float
    is_exact: bool = False
    costs: str = ""

    @property
    def gap(self) -> float:
        """Return the share of `seconds` that a shorter schedule could save at most."""
        return relative_gap(self.seconds, self.bound)

    @property
    def is_optimal(self) -> bool:
        """Return whether no schedule is shorter."""
        return self.gap <= _ROUNDING

    def __str__(self) -> str:
        text = f"makespan {self.seconds:.6g}, lower bound {self.bound:.6g}, gap {self.gap:.1%}"
        if self.is_optimal:
            return f"{text}: optimal"
        return (
            text
            if self.is_exact
            else f"{text}: nothing was proven exactly, which needs pip install 'pipecompile[exact]'"
        )
