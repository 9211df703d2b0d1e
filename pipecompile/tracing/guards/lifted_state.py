"""Numbers of a model that change between steps, and that a recording reads at every run instead of containing them.

install     put stand-ins for the numbers into the model while it is recorded
refresh     read the present numbers before a run, and compare them as the recording has compared them
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock
from types import CellType
from typing import Any

from pipecompile.tracing.fakes.lifted_numbers import Comparison, LiftedFloat, LiftedInt

__all__ = ["Holder", "LiftedState", "NOTHING_LIFTED"]

_LOCK = Lock()
_CLASSES: dict[type, Any] = {float: LiftedFloat, int: LiftedInt}


@dataclass(frozen=True, slots=True)
class Holder:
    """An item of a container, or an attribute of an object or class: where a value of the model is found."""

    container: Any
    key: Any

    def get(self) -> Any:
        """Return the present value."""
        if isinstance(self.container, dict):
            return dict.__getitem__(self.container, self.key)
        return self.container[self.key] if isinstance(self.container, (list, deque)) else getattr(self.container, self.key)  # fmt: skip

    def put(self, value: Any) -> None:
        """Replace the value."""
        if isinstance(self.container, dict):
            dict.__setitem__(self.container, self.key, value)
        elif isinstance(self.container, (list, deque)):
            self.container[self.key] = value
        else:
            setattr(self.container, self.key, value)

    @property
    def is_writable(self) -> bool:
        """Whether the value is a number that can be replaced by a stand-in."""
        is_kept = isinstance(self.container, (dict, list, deque, CellType, type)) or hasattr(
            self.container, "__slots__"
        )
        return is_kept and type(self.get()) in _CLASSES


class LiftedState:
    """The numbers that one recording reads at every run, by label. `comparisons` are those that its Python has made.

    `numbers` is another dictionary after each `refresh`: a recomputation puts back the one of its forward.
    """

    def __init__(self, holders: Mapping[str, Holder] | None = None) -> None:
        self.holders = {label: holder for label, holder in (holders or {}).items() if holder.is_writable}
        self.numbers = {label: holder.get() for label, holder in self.holders.items()}
        self.comparisons: dict[str, Comparison] = {}
        self._n_inside, self._present = 0, self.numbers

        def lifted(label: str) -> Any:
            return self.numbers[label]

        lifted.state, lifted.__qualname__ = self, "lifted"  # type: ignore[attr-defined]
        self.function = lifted
        """The function of the nodes that read a number. Its name is part of saved plans."""

    @contextmanager
    def install(self) -> Iterator[None]:
        """Put stand-ins into the model inside the block."""
        self.comparisons.clear()
        originals = {label: holder.get() for label, holder in self.holders.items()}
        try:
            for label, holder in self.holders.items():
                number = originals[label]
                holder.put(_CLASSES[type(number)](self.function, (label,), number, self.comparisons))
            yield
        finally:
            for label, holder in self.holders.items():
                holder.put(originals[label])

    def refresh(self, holders: Mapping[str, Holder]) -> bool:
        """Take the present numbers. Return whether all comparisons have the answers with which the model was recorded."""
        self.numbers = {label: holder.get() for label, holder in holders.items() if label in self.holders}
        return all(comparison.holds() for comparison in self.comparisons.values())

    @contextmanager
    def restored(self, numbers: dict[str, Any]) -> Iterator[None]:
        """Let the graph read these numbers inside the block. Threads inside at the same time have the same numbers; the last one to leave
        puts the present ones back.
        """
        with _LOCK:
            if not self._n_inside:
                self._present = self.numbers
            self._n_inside, self.numbers = self._n_inside + 1, numbers
        try:
            yield
        finally:
            with _LOCK:
                self._n_inside -= 1
                if not self._n_inside:
                    self.numbers = self._present


NOTHING_LIFTED = LiftedState()
"""The state of a recording that contains all numbers."""
