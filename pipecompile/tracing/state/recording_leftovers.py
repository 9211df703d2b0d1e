"""What the calls of one recording leave on the model, apart from what modules kept whole leave whenever they run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from pipecompile.tracing.state.leftover_state import Change, Watch, hooks_of, marks, without

__all__ = ["Remains"]


class Remains:
    """Made when the twins are in their places. `lists` are the containers, by identity, whose length Python may ask for;
    `stands_for` tells whether one value is only the twin of another.
    """

    def __init__(self, model: nn.Module, stands_for: Callable[[object, object], bool]) -> None:
        self.model, self.stands_for = model, stands_for
        self.watch = Watch(model)
        self.lists = self.watch.lengths
        self._asked: set[int] = set()
        self._by_leaves: set[tuple[int, Any]] = set()

    def asks_length(self, container: Any) -> None:
        """Python wants to know how much there is in a container of the model's: calls may differ by that."""
        self._asked.add(id(container))

    def depends(self, changes: list[Change]) -> bool:
        """Was the length asked of a container that is among the changes?"""
        return any(id(change.place.container) in self._asked for change in changes)

    @contextmanager
    def leaf(self, module: nn.Module) -> Iterator[None]:
        """The call of a module kept whole: what it changes, and its hooks, it will change whenever it runs."""
        watch = Watch(module, *found) if (found := hooks_of(module)) else None
        yield
        if watch:
            self._by_leaves |= marks(watch.changes())

    def changes(self, since: Watch | None = None) -> list[Change]:
        """What calls changed since then, or since the beginning."""
        found = without((since or self.watch).changes(), self._by_leaves)
        return [change for change in found if not self.stands_for(change.value, change.before)]
