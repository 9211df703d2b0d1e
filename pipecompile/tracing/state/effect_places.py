"""The places where effect nodes write. A recomputation writes there again, because the loss of the last stage may read it.

    F0  self.feat = h0, loss reads feat     F1  self.feat = h1     R0  self.feat = h0 again, loss reads feat     then h1 is put back

A recomputation runs the effect nodes of its stage again. A counter first goes back to where the forward found it, a list to its
items then; a value that is replaced needs neither.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from pipecompile.tracing.state.container_routes import ContainerRoute

__all__ = ["EffectPlace", "put_value", "restored_places", "value_at"]

MISSING: Any = object()
"""Stands for the value at a key that a container does not have."""


def value_at(container: Any, key: Any) -> Any:
    """Return the value that is stored at a key of a container, or the content of a variable; `MISSING` if there is none."""
    if isinstance(container, dict):
        return dict.get(container, key, MISSING)  # not the user's own __getitem__ or __missing__
    try:
        return list.__getitem__(container, key) if isinstance(container, list) else container.cell_contents
    except (IndexError, ValueError):  # ValueError: an empty variable
        return MISSING


def put_value(container: Any, key: Any, value: Any) -> None:
    """Replace a value in a container, or the content of a variable; `MISSING` removes it."""
    if isinstance(container, (dict, list)):
        if value is not MISSING:
            container[key] = value
        elif isinstance(container, dict):
            container.pop(key, None)
    elif value is not MISSING:
        container.cell_contents = value


@dataclass(frozen=True, slots=True)
class EffectPlace:
    """A key of a container, or with key None all items of a list or set. `is_count` says that a number is added to what is there,
    `is_attribute` that the container is the attributes of a module, and gets no list or dict.
    """

    route: ContainerRoute
    key: Any
    is_count: bool = False
    is_attribute: bool = False

    @property
    def container(self) -> Any:
        """The container that is there now."""
        return self.route.find()

    def now(self) -> Any:
        """Return what is there."""
        return list(self.container) if self.key is None else value_at(self.container, self.key)

    def before(self) -> Any:
        """Return what a recomputation of the forward that begins now must find there. It keeps no tensor that the forward replaces."""
        now = self.now() if self.key is None or self.is_count else MISSING
        return None if self.is_count and now is MISSING else now  # the counter begins again

    def advance(self, step: float, first: float) -> None:
        """Add a step to the number that is there; where none is, put the first number."""
        now = self.now()
        self.put(first if now is MISSING or now is None else now + step)

    def extend(self, items: Iterable[Any]) -> None:
        """Add items to the list or set that is there now."""
        container = self.container
        (container.update if isinstance(container, set) else container.extend)(items)

    def put(self, value: Any) -> None:
        """Write what `now` has returned."""
        if self.key is None:
            self.container.clear()
            self.extend(value)
        else:
            put_value(self.container, self.key, value)


@contextmanager
def restored_places(places: Sequence[EffectPlace], before: Sequence[Any]) -> Iterator[None]:
    """Set places to what `before` says for this context, and at its end back to what they have now."""
    now = [place.now() for place in places]
    try:
        for place, value in zip(places, before, strict=True):
            if value is not MISSING:
                place.put(value)
        yield
    finally:
        for place, value in zip(places, now, strict=True):
            place.put(value)
