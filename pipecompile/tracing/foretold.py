"""What a call of a piece will give in any run, told from two trial runs with batches of different size.

run of 4 samples     run of 3 samples     foretold
(4, 8)               (3, 8)               (batch_size, 8)
(20,)                (15,)                (5 * batch_size,)
(37, 4)              (31, 4)              (?, 4)              the data decide; dimension 0 is never taken for granted
7                    7                    7
0.31                 0.28                 nothing: the piece cannot be kept whole
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch

from pipecompile.tracing.forms import Form
from pipecompile.tracing.pieces import Piece
from pipecompile.tracing.trials import Call, Seen

__all__ = ["UNKNOWN", "Foretold", "Leaf", "Size", "Unforetold", "comparable", "foretold"]

UNKNOWN = None
"""A size that the data decide."""

Size = int | Fraction | None
"""A number, so many times the batch size, or UNKNOWN."""

_PLAIN = (
    int,
    float,
    complex,
    bool,
    str,
    bytes,
    type(None),
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
)


class Unforetold(Exception):
    """A piece gives what cannot be foretold."""

    def __init__(self, piece: Piece, why: str) -> None:
        super().__init__(why)
        self.piece, self.why = piece, why


@dataclass(frozen=True, slots=True)
class Leaf:
    """One leaf; `seen` is None for a plain value."""

    shape: tuple[Size, ...]
    seen: Seen | None
    value: Any = None


@dataclass(frozen=True, slots=True)
class Foretold:
    """One call: what it gives in any run, and what it did in the first trial run."""

    form: Form
    leaves: tuple[Leaf, ...]
    call: Call


def comparable(first: Mapping[Piece, list[Call]], second: Mapping[Piece, list[Call]]) -> bool:
    """Did two runs make the same calls, with results of the same structure?"""
    pairs = [(first[piece], second[piece]) for piece in first]
    return all([_structure(call) for call in a] == [_structure(call) for call in b] for a, b in pairs)


def _structure(call: Call) -> tuple[Form, list[type]]:
    return call.form, [type(leaf) for leaf in call.leaves]


def foretold(
    piece: Piece, first: list[Call], second: list[Call], size: int | None, other: int | None
) -> list[Foretold]:
    """What each call gives, from the calls of two runs with `size` and `other` samples. Raises Unforetold."""
    if len(first) != len(second):
        raise Unforetold(piece, "it is called more often for some data than for others")
    return [_call(piece, a, b, size, other) for a, b in zip(first, second, strict=True)]


def _call(piece: Piece, a: Call, b: Call, size: int | None, other: int | None) -> Foretold:
    if a.stray or b.stray:
        raise Unforetold(piece, "it computes on tensors that are no arguments of its own")
    if _structure(a) != _structure(b):
        raise Unforetold(piece, "the structure of what it returns depends on the data")
    leaves = tuple(_leaf(piece, x, y, size, other) for x, y in zip(a.leaves, b.leaves, strict=True))
    return Foretold(a.form, leaves, a)


def _leaf(piece: Piece, x: Any, y: Any, size: int | None, other: int | None) -> Leaf:
    if isinstance(x, Seen):
        if len(x.shape) != len(y.shape) or x.dtype != y.dtype:
            raise Unforetold(piece, "the number of dimensions or the dtype of a result depends on the data")
        return Leaf(
            tuple(_size(d, s, t, size, other) for d, (s, t) in enumerate(zip(x.shape, y.shape, strict=True))), x
        )
    if isinstance(x, bool):
        raise Unforetold(piece, "it returns a bool: Python decides by the data")
    if not isinstance(x, _PLAIN):
        raise Unforetold(piece, f"it returns a {type(x).__name__}")
    if x != y and not repr(x) == repr(y) == "nan":
        raise Unforetold(piece, f"it returns a {type(x).__name__} that depends on the data")
    return Leaf((), None, x)


def _size(dim: int, one: int, two: int, size: int | None, other: int | None) -> Size:
    if size and other and size != other and one and Fraction(one, size) == Fraction(two, other):
        return Fraction(one, size)
    return one if dim and one == two else UNKNOWN
