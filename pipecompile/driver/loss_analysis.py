"""The analysis of the loss of a step: its divisor, and the state of the loss function that this holds for.

criterion.ignore_index = 0      the divisor counts other labels: the loss is analysed again before the next step
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pipecompile.batching.merging import MergeKind, MergeRule
from pipecompile.batching.microbatches import LossDivisor
from pipecompile.driver.measured_shares import MeasuredShares
from pipecompile.tracing.guards.state_guards import StateGuards

__all__ = ["UNKNOWN", "WITHOUT_DIVISOR", "Count", "LossAnalysis", "no_count"]

UNKNOWN = MergeRule(MergeKind.COMPUTED)
"""The rule of a loss of which nothing is known."""

WITHOUT_DIVISOR = (MergeKind.ADDED, MergeKind.AVERAGED, MergeKind.SAME)
"""Rules of losses for which the shares of samples are right, or that were declared means and are sums."""

Count = Callable[[], LossDivisor | None]
"""Return the count of a mean: its divisor as a number that can be compared between recordings; None if it is not known."""


def no_count() -> None:
    """Return None: the count of a loss that cannot be analysed."""


@dataclass(frozen=True, slots=True)
class LossAnalysis:
    """The result of the analysis of a loss.

    divisor    what it divides by; None if it has no divisor or that is not known
    rule       how losses of micro-batches merge, COMPUTED if that is not known
    count      the count of a mean
    line       the user's line at which samples meet, "" if none is known: in the loss, or with a divisor before what it takes
    guards     on what the loss function read while it was recorded; None if nothing can change the result
    changes    how often the loss was analysed before
    weights    ids of the parameters and buffers that the loss function uses, as far as is known
    """

    divisor: LossDivisor | MeasuredShares | None
    rule: MergeRule
    count: Count = no_count
    line: str = ""
    guards: StateGuards | None = None
    changes: int = 0
    weights: frozenset[int] = frozenset()

    @property
    def is_unknown(self) -> bool:
        """Whether it is not known how losses of micro-batches merge."""
        return self.divisor is None and self.rule.kind is MergeKind.COMPUTED
