"""Counters that a forward advances: does Python decide on them, and does each call add the same?

self.n += 1                        a node adds 1 at every run
if self.n > 1000: ...              a warning with the line: the recording goes the way of its first call forever
self.n = (self.n + 1) % 4          no counter, although the first two calls add 1 each
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from pipecompile.errors import RecordingWarning
from pipecompile.tracing.fakes.lifted_numbers import Comparison, LiftedFloat, LiftedInt, LiftedNumber
from pipecompile.tracing.state.effect_places import put_value
from pipecompile.tracing.state.leftover_state import StateChange
from pipecompile.tracing.user_source import warn

__all__ = ["adds_a_constant", "counters_watched", "warn_of_decisions"]


def _counter(name: str) -> Any:
    raise AssertionError(f"{name} is read while it is recorded only")


_counter.__name__ = "lifted"


@contextmanager
def counters_watched(changes: Sequence[StateChange]) -> Iterator[dict[str, Comparison]]:
    """Put stand-ins for counters, which these changes advance, into the model. Yield the comparisons that Python makes with them.

    The caller restores the model.
    """
    comparisons: dict[str, Comparison] = {}
    for change in changes:
        cls: Any = LiftedFloat if isinstance(change.value, float) else LiftedInt
        put_value(change.place.container, change.key, cls(_counter, (change.name,), change.value, comparisons))
    yield comparisons


def adds_a_constant(value: Any) -> bool:
    """Return whether a number is a counter with constants added to it, times a constant: it grows by the same in every call."""
    if not isinstance(value, LiftedNumber) or value.function is _counter:
        return True
    if value.function not in (operator.add, operator.sub, operator.mul, operator.truediv):
        return False
    parts = [one for one in value.args if isinstance(one, LiftedNumber)]
    is_reciprocal = value.function is operator.truediv and value.args[0] is not parts[0]
    return len(parts) == 1 and not is_reciprocal and adds_a_constant(parts[0])


def warn_of_decisions(comparisons: dict[str, Comparison], advanced: Sequence[LiftedNumber], model: nn.Module) -> None:
    """Warn of the first decision of Python on a counter that the forward advances."""
    labels = frozenset[str]().union(*(one.labels for one in advanced))
    decided = [one for one in comparisons.values() if labels & (one.left.labels | _labels(one.right))]
    for one in decided[:1]:
        what = (
            f"{type(model).__name__}.forward advances a counter and decides on it at {one.place} ({one}): the recording goes the same"
            " way at every run. Try counting in the training script: model.step = step before every step is noticed"
        )
        warn(what, RecordingWarning)


def _labels(number: Any) -> frozenset[str]:
    return number.labels if isinstance(number, LiftedNumber) else frozenset()
