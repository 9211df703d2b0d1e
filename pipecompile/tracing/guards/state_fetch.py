"""The check whether anything has changed, in a few expressions that run in C: identity of values, lengths, classes, metadata."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from operator import call, is_
from typing import Any

from pipecompile.tracing.guards.read_state import ReadState
from pipecompile.tracing.guards.strict_equality import is_same
from pipecompile.tracing.guards.tensor_metadata import TensorMetadata

__all__ = ["StateFetch"]


class StateFetch:
    """The state as parallel lists, fetched again by `is_unchanged`. `metadata` are those of its tensors."""

    def __init__(self, state: ReadState) -> None:
        self._fetches = [fetch for fetch, _, _ in state.rows]
        self._holders = [holder for _, holder, _ in state.rows]
        self._values = [value for _, _, values in state.rows for value in values]
        self._sized, self._lengths = state.sized, list(map(len, state.sized))
        self._typed, self._types = state.typed, list(map(type, state.typed))
        self._arrays = [(array, content) for _, array, content in state.arrays]
        self.metadata = TensorMetadata(state.tensors)

    def is_unchanged(self) -> bool:
        """Return whether every value is identical to the one noted, or an immutable value equal to it."""
        return (
            list(map(len, self._sized)) == self._lengths
            and self._has_same_values()
            and all(map(is_, map(type, self._typed), self._types))
            and self.metadata.holds()
            and all(array.tobytes() == content for array, content in self._arrays)
        )

    def is_surely_changed(self) -> bool:
        """Return whether a value differs that cannot be replaced by an equal one: metadata of a tensor, a plain value."""
        return not self.metadata.holds()

    def _has_same_values(self) -> bool:
        try:
            if all(map(is_, self._fetch(), self._values)):
                return True
            now = list(self._fetch())
        except (KeyError, AttributeError, ValueError):  # a name was deleted, a variable emptied
            return False
        if len(now) != len(self._values) or not all(map(is_same, self._values, now)):
            return False
        self._values = now
        return True

    def _fetch(self) -> Iterable[Any]:
        return chain.from_iterable(map(call, self._fetches, self._holders))
