"""Iterators as state of a function, such as `itertools.count()` or a generator: what a run that is not the user's own takes is given again.

    self.steps = count()     before the run          the run takes 0, 1        after it: 0, 1, then on with 2, 3, ...

An iterator cannot be put back. In its place the holder gets one that remembers, and keeps it if the run took anything.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

from pipecompile.tracing.state.snapshot import Place, content_of, set_content

__all__ = ["ReplayedIterator", "iterators_replayed"]


class ReplayedIterator:
    """An iterator over the items of `source` that can go back to a mark. All else is asked of `source`."""

    def __init__(self, source: Iterator[Any]) -> None:
        self._source, self._taken = source, list[Any]()
        self._position = self._marks = 0

    def __iter__(self) -> ReplayedIterator:
        return self

    def __next__(self) -> Any:
        if self._position == len(self._taken):
            self._taken.append(next(self._source))
        item = self._taken[self._position]
        self._position += 1
        if not self._marks:
            del self._taken[: self._position]
            self._position = 0
        return item

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "_source"), name)

    def __repr__(self) -> str:
        return f"{self._source!r}, after {self._taken[self._position :]!r}" if self._taken else repr(self._source)

    def mark(self) -> int:
        """Remember the items from here on, until `rewind`."""
        self._marks += 1
        return self._position

    def rewind(self, mark: int) -> bool:
        """Go back to a mark, and return whether items were taken since."""
        self._marks -= 1
        is_advanced, self._position = self._position != mark, mark
        return is_advanced


@contextmanager
def iterators_replayed(
    places: Iterable[Place], scopes: Iterable[tuple[MutableMapping[str, Any], Iterable[str]]]
) -> Iterator[list[ReplayedIterator]]:
    """Let the iterators in containers, and in globals by name, give the items that they give in the block again after it. The list then
    has those that gave any.
    """
    holders = _Holders([place.container for place in places], [(space, (*names,)) for space, names in scopes])
    found, advanced = holders.replace(), list[ReplayedIterator]()
    marks = [(one, one.mark()) for one in found]
    try:
        yield advanced
    finally:
        advanced += [one for one, mark in marks if one.rewind(mark)]
        holders.put_back({id(one) for one in advanced})


class _Holders:
    """Containers and namespaces with iterators, and the iterators that stand for them meanwhile."""

    def __init__(self, containers: list[Any], scopes: list[tuple[MutableMapping[str, Any], tuple[str, ...]]]) -> None:
        self._containers = [(one, content) for one in containers if any(map(_is_held, content := content_of(one)))]
        self._globals = [
            (space, name, space[name]) for space, names in scopes for name in names if _is_iterator(space.get(name))
        ]
        self._of: dict[int, ReplayedIterator] = {}
        self._kept: set[int] | None = None

    def replace(self) -> list[ReplayedIterator]:
        """Put iterators that remember in the places of others, and return all that remember."""
        self._fill()
        return list(self._of.values())

    def put_back(self, kept: set[int]) -> None:
        """Put the others back, but for those in whose places the iterators with these ids are."""
        self._kept = kept
        self._fill()

    def _fill(self) -> None:
        for container, content in self._containers:
            set_content(container, [self._in_place_of(item) for item in content])
        for space, name, value in self._globals:
            space[name] = self._in_place_of(value)

    def _in_place_of(self, item: Any) -> Any:
        if type(item) is tuple and len(item) == 2:  # the key and the value of an attribute
            return (item[0], self._in_place_of(item[1]))
        if not _is_iterator(item):
            return item
        one = self._of.setdefault(id(item), item if isinstance(item, ReplayedIterator) else ReplayedIterator(item))
        return one if self._kept is None or id(one) in self._kept else item


def _is_held(item: Any) -> bool:
    return _is_iterator(item) or (type(item) is tuple and len(item) == 2 and _is_iterator(item[1]))


def _is_iterator(value: Any) -> bool:
    """Return whether a value is an iterator of Python or itertools, such as a generator: those of others have attributes."""
    kind = type(value)
    is_known = kind is ReplayedIterator or kind.__module__ in {"builtins", "itertools"}
    return is_known and hasattr(kind, "__next__")
