"""Values of a model that change between steps: after the second change of a number, recordings read it at every run.

    model.temperature = 0.9     before step 2: recorded anew, with the constant 0.9
    model.temperature = 0.8     before step 3: recorded anew, with a node that reads the temperature
    model.temperature = 0.7     before step 4: the same recording

A piece that needs the number as a constant (a shape, a loop) is kept whole. Where that cannot be either, the model is recorded anew at
every change. One warning says so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from torch import nn

from pipecompile.driver.warnings_once import WarningsOnce
from pipecompile.errors import TraceError
from pipecompile.options import Options
from pipecompile.tracing.fakes.lifted_numbers import NotLiftedError
from pipecompile.tracing.guards.lifted_state import NOTHING_LIFTED, Holder, LiftedState
from pipecompile.tracing.guards.state_guards import ReadChange, StateGuards
from pipecompile.tracing.leaf_modules import is_leaf
from pipecompile.tracing.traced_graph import TracedGraph

__all__ = ["ChangingValues"]

_LIFTED_AT, _WARNED_AT = 2, 3
"""Changes of one value, each with a recording, from which on it is read at every run; and from which on a warning says that it is not."""

_CAUSES = 8
"""Causes of an error that are looked at: a chain of causes may be a circle."""


@dataclass(eq=False)
class ChangingValues:
    """The changes of values over all recordings of one model. `counts` has the number of changes by label."""

    model: nn.Module
    warnings: WarningsOnce
    counts: Counter[str] = field(default_factory=Counter)
    _refused: dict[str, str] = field(default_factory=dict)

    def note(self, changes: Sequence[ReadChange], options: Options) -> None:
        """Count changes that make a recording necessary. Warn of those that make a recording necessary every time."""
        for change in changes:
            self.counts[change.label] += 1
            is_number = {type(change.before), type(change.now)} <= {int, float}
            if is_number and (options.cuda_graphs or options.compile_stages):
                self._refused[change.label] = "a captured or compiled stage contains it"
            elif not is_number:
                self._refused[change.label] = "it is not a plain number"
            if self.counts[change.label] >= _WARNED_AT and change.label in self._refused:
                self.warnings.changing(change.label, change.place, self._refused[change.label])

    def forget(self, changes: Sequence[ReadChange]) -> None:
        """Take back `note` of changes for which no recording was made: they are met again."""
        self.counts.subtract(change.label for change in changes)

    def lifted(self, guards: Iterable[StateGuards]) -> LiftedState:
        """Return the numbers that the next recording reads at every run. `guards` are those of the recordings so far."""
        labels = {label for label, count in self.counts.items() if count >= _LIFTED_AT} - self._refused.keys()
        if not labels:
            return NOTHING_LIFTED
        leaves = {
            id(vars(module)) for module in self.model.modules() if is_leaf(module)
        }  # their nodes run them as they are
        holders: dict[str, Holder] = {}
        for one in guards:
            holders |= {label: holder for label, holder in one.holders().items() if label in labels}
        return LiftedState({label: one for label, one in holders.items() if id(one.container) not in leaves})

    def refuse(self, lifted: LiftedState, error: TraceError) -> LiftedState:
        """Note that the recording failed with these numbers lifted, and return those to try again."""
        labels = _labels_at_fault(error) & lifted.holders.keys() or frozenset(lifted.holders)
        for label in sorted(labels):
            self._refused[label] = "the recording needs it as a constant"
            self.warnings.changing(label, error.where, self._refused[label])
        return LiftedState({label: holder for label, holder in lifted.holders.items() if label not in labels})

    def note_kept(self, graph: TracedGraph) -> None:
        """Warn of pieces that are kept whole because of a number that changes."""
        for reason in graph.facts.kept:
            if isinstance(reason.fault, NotLiftedError):
                for label in sorted(reason.fault.labels):
                    self.warnings.changing(label, reason.fault.where, "", reason.piece.text)


def _labels_at_fault(error: TraceError) -> frozenset[str]:
    """Return the labels of the numbers that a recording could not read at every run; none if something else failed."""
    cause: BaseException | None = error
    for _ in range(_CAUSES):
        if cause is None or isinstance(cause, NotLiftedError):
            break
        cause = cause.__cause__
    return cause.labels if isinstance(cause, NotLiftedError) else frozenset()
