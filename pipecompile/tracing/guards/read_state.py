"""The state that a recording depends on: every value that it read, under a label by which the user reaches the value."""

from __future__ import annotations

import dis
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from operator import itemgetter
from types import CodeType
from typing import Any

import torch

from pipecompile.tracing.guards.attribute_reads import Reads
from pipecompile.tracing.guards.lifted_state import Holder

__all__ = ["ABSENT", "Place", "ReadState", "codes_in", "line_of_read"]


class _Absent:
    """The value of a name that was looked up and not found."""

    def __repr__(self) -> str:
        return "absent"


ABSENT = _Absent()

Place = str | tuple[CodeType, str]
"""The user's line of a read; or code and the name that it loads, from which the line follows."""


@dataclass(slots=True)
class ReadState:
    """Values by label, and the same values as rows that can be fetched again.

    values    per label: an immutable value, an object that counts by its identity, or the type and length of a container
    places    per label: where the value is read
    reads     per label of an object: the names that were read on it
    rows      (function that fetches values, its argument, the values)
    sized     containers whose length counts
    typed     objects whose class counts
    tensors   (label, tensor) of each tensor
    arrays    (label, numpy array, copy of its bytes)
    risks     per label: the reason why a change would not be noticed
    holders   per label of a number: where it is found
    """

    values: dict[str, Any] = field(default_factory=dict)
    places: dict[str, Place] = field(default_factory=dict)
    reads: dict[str, Reads] = field(default_factory=dict)
    rows: list[tuple[Callable[[Any], Iterable[Any]], Any, Iterable[Any]]] = field(default_factory=list)
    sized: list[Any] = field(default_factory=list)
    typed: list[Any] = field(default_factory=list)
    tensors: list[tuple[str, torch.Tensor]] = field(default_factory=list)
    arrays: list[tuple[str, Any, bytes]] = field(default_factory=list)
    risks: dict[str, str] = field(default_factory=dict)
    holders: dict[str, Holder] = field(default_factory=dict)

    def add(self, label: str, value: Any, place: Place) -> None:
        """Note a value."""
        self.values[label] = value
        self.places[label] = place

    def add_row(self, fetch: Callable[[Any], Iterable[Any]], holder: Any) -> None:
        """Note values that `fetch(holder)` returns."""
        self.rows.append((fetch, holder, tuple(fetch(holder))))

    def add_names(self, mapping: Mapping[str, Any], names: Iterable[str]) -> None:
        """Note the values of a mapping under these names."""
        if keys := list(names):
            self.add_row(itemgetter(*keys, keys[0]), mapping)  # of a single name, itemgetter returns no tuple


def line_of_read(place: Place) -> str:
    """Return the user's line of a read as "file:line in function"."""
    if isinstance(place, str):
        return place
    code, name = place
    lines = [line for inner in codes_in(code) for line in _lines_of(inner, name)]
    return f"{code.co_filename}:{lines[0] if lines else code.co_firstlineno} in {code.co_qualname}"


def codes_in(code: CodeType) -> Iterable[CodeType]:
    """Yield a code and those of the functions that it makes."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from codes_in(constant)


def _lines_of(code: CodeType, name: str) -> Iterable[int]:
    line = code.co_firstlineno
    for instruction in dis.get_instructions(code):
        line = (instruction.positions.lineno if instruction.positions else None) or line
        if instruction.argval == name and instruction.opname.startswith("LOAD"):
            yield line
