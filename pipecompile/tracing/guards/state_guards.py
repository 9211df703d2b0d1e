"""The guards of one recording: the check that all it read is unchanged, and the text of a change with the line that reads it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from pipecompile.text.shown_value import shown, type_text
from pipecompile.tracing.guards.attribute_reads import AttributeReads
from pipecompile.tracing.guards.lifted_state import NOTHING_LIFTED, Holder, LiftedState
from pipecompile.tracing.guards.read_state import ABSENT, Place, ReadState, line_of_read
from pipecompile.tracing.guards.state_fetch import StateFetch
from pipecompile.tracing.guards.state_reader import StateReader
from pipecompile.tracing.guards.strict_equality import is_same
from pipecompile.tracing.user_source import line_of

__all__ = ["ReadChange", "RecordedReads", "StateGuards"]


@dataclass(frozen=True, slots=True)
class RecordedReads:
    """The reads of one recording of `model`, (container, key) of the state that its graph writes, and what it reads at every run.

    `others` are objects beside the model, by label, whose reads count too. `asked` has the user's line
    that first asked for `LAYOUTS` or for `INFERENCE_MODE`.
    """

    model: nn.Module
    notes: AttributeReads
    written: frozenset[tuple[int, Any]] = frozenset()
    lifted: LiftedState = NOTHING_LIFTED
    others: tuple[tuple[str, Any], ...] = ()
    asked: Mapping[str, str] = field(default_factory=dict)

    def guards(self) -> StateGuards:
        """Return guards on the present state of the model."""
        return StateGuards(self)


@dataclass(frozen=True, slots=True)
class ReadChange:
    """A value that a recording read and that has changed since. `label` is the path by which the user's code reaches it."""

    label: str
    before: Any
    now: Any
    place: str

    def __str__(self) -> str:
        read = f", read at {line_of(self.place)}" if self.place else ""
        return f"{self.label}: {_text(self.before)} -> {_text(self.now)}{read}"


class StateGuards:
    """The state behind the reads of a recording, at the time of construction. `fetch` is the quick check of it."""

    def __init__(self, recorded: RecordedReads) -> None:
        self._recorded = recorded
        self._state = self._read()
        self.fetch = StateFetch(self._state, recorded.lifted)

    @property
    def state(self) -> ReadState:
        """The state that the recording read. It is another object once equal values were taken over."""
        return self._state

    @property
    def risks(self) -> dict[str, str]:
        """The state that the recording read and whose changes are not noticed: by label, the reason."""
        return self._state.risks

    @property
    def parameters(self) -> tuple[nn.Parameter, ...]:
        """The parameters that the recording read."""
        return tuple(tensor for _, tensor in self._state.tensors if isinstance(tensor, nn.Parameter))

    def hold(self) -> bool:
        """Return whether the recording is right for the present state of the model.

        Objects that were replaced by others with equal content are taken over.
        """
        if self.fetch.is_unchanged():
            return True
        if self.fetch.is_surely_changed():
            return False
        state = self._read(self._state)
        if any(True for _ in _differences(self._state, state)):
            return False
        self._state, self.fetch = state, StateFetch(state, self._recorded.lifted)
        return self.fetch.is_unchanged()

    def changes(self) -> list[ReadChange]:
        """Return what has changed since the recording, each change with the line that reads it."""
        of_tensors = [
            ReadChange(f"{label}.{name}", before, now, line_of_read(self._state.places[label]))
            for label, name, before, now in self.fetch.metadata.changes()
        ]
        others = [
            ReadChange(label, before, now, line_of_read(place))
            for label, before, now, place in _differences(self._state, self._read(self._state))
        ]
        compared = [
            ReadChange(str(one), one.answer, not one.answer, one.place)
            for one in self.lifted.comparisons.values()
            if not one.holds()
        ]
        return _outermost(of_tensors + others) + compared

    @property
    def lifted(self) -> LiftedState:
        """The numbers that the recording reads at every run."""
        return self._recorded.lifted

    def holders(self) -> dict[str, Holder]:
        """Return where the numbers that the recording read are found now, by label."""
        return self._read(self._state).holders

    def _read(self, known: ReadState | None = None) -> ReadState:
        recorded = self._recorded
        reader = StateReader(recorded.model, recorded.notes, recorded.written, recorded.lifted.holders)
        for label, value in recorded.others:
            reader.later(value, label, "")
        return reader.read(known.reads if known else None)


def _differences(before: ReadState, now: ReadState) -> Iterator[tuple[str, Any, Any, Place]]:
    """Yield (label, value then, value now, place) of each value that differs."""
    for label in before.values | now.values:
        then, value = before.values.get(label, ABSENT), now.values.get(label, ABSENT)
        if not is_same(then, value):
            yield label, then, value, before.places.get(label) or now.places.get(label, "")
    contents = {label: content for label, _, content in before.arrays}
    for label, array, content in now.arrays:
        if contents.get(label, content) != content:
            yield label, "other numbers", array, before.places[label]


def _outermost(changes: list[ReadChange]) -> list[ReadChange]:
    """Return the changes without those inside an object or container that changed as a whole."""
    labels = [change.label for change in changes]
    return [c for c in changes if not any(c.label.startswith((f"{one}.", f"{one}[", f"{one},")) for one in labels)]


def _text(value: Any) -> str:
    """Return a value as a short text: a module by the settings that it writes, a tensor or container by its kind."""
    is_of_kind = hasattr(value, "__dict__") and not callable(value)
    text = _settings(value) or (type_text(value) if is_of_kind else shown(value))
    return text if len(text) <= 60 else f"{text[:57]}..."


def _settings(value: Any) -> str:
    """Return what a module writes of itself; empty for other values, and where that fails."""
    with suppress(Exception):
        return repr(value) if isinstance(value, nn.Module) else ""
    return ""
