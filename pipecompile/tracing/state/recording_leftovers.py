"""The leftovers of one recording: changes on the model that the graph has to make, and lengths that Python has read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from pipecompile.tracing.state.leftover_state import StateChange, StateWatch, change_keys, hooks_of, without_keys

__all__ = ["RecordingLeftovers"]


class RecordingLeftovers:
    """The changes that calls leave on the model. Construct it when the fake twins are in the model's tables.

    `sized_containers` has the ids of the model's containers that have a length. `stands_for(a, b)` returns whether `a` is
    the fake twin of `b`.
    """

    def __init__(self, model: nn.Module, stands_for: Callable[[object, object], bool]) -> None:
        self.model, self.stands_for = model, stands_for
        self.watch = StateWatch(model)
        self.sized_containers = self.watch.lengths
        self._lengths_read: set[int] = set()
        self._leaf_keys: set[tuple[int, Any]] = set()

    def note_length_read(self, container: Any) -> None:
        """Note that Python reads the length of a container of the model: later calls may depend on it."""
        self._lengths_read.add(id(container))

    def is_length_read(self, changes: list[StateChange]) -> bool:
        """Return whether Python has read the length of a changed container."""
        return any(id(change.place.container) in self._lengths_read for change in changes)

    @contextmanager
    def leaf_call(self, module: nn.Module) -> Iterator[None]:
        """Leave out what a leaf module and its hooks change inside the block: the node runs them, so it changes the same."""
        watch = StateWatch(module, *hooks) if (hooks := hooks_of(module)) else None
        yield
        if watch:
            self._leaf_keys |= change_keys(watch.changes())

    def changes(self, since: StateWatch | None = None) -> list[StateChange]:
        """Return the changes since then, by default since construction."""
        changes = without_keys((since or self.watch).changes(), self._leaf_keys)
        return [change for change in changes if not self.stands_for(change.value, change.before)]
