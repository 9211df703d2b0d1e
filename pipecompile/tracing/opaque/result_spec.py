"""What a call of a piece will give in any run, told from trial runs with batches of different size.

run of 4 samples     run of 3 samples     foretold
(4, 8)               (3, 8)               (batch_size, 8)
(20,)                (15,)                (5 * batch_size,)
(37, 4)              (31, 4)              (?, 4)              the data decide; dimension 0 is never taken for granted
7                    7                    7
0.31                 0.28                 nothing: the piece cannot be kept whole
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch

from pipecompile.torch_private import pytree
from pipecompile.tracing.model_pieces import Piece
from pipecompile.tracing.opaque.trial_runs import Call, Seen

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

    form: pytree.TreeSpec
    leaves: tuple[Leaf, ...]
    call: Call


def comparable(first: Mapping[Piece, list[Call]], second: Mapping[Piece, list[Call]]) -> bool:
    """Did two runs make the same calls, with results of the same structure?"""
    pairs = [(first[piece], second[piece]) for piece in first]
    return all([_structure(call) for call in a] == [_structure(call) for call in b] for a, b in pairs)


def _structure(call: Call) -> tuple[pytree.TreeSpec, list[type]]:
    return call.form, [type(leaf) for leaf in call.leaves]


def foretold(piece: Piece, runs: Sequence[list[Call]], sizes: Sequence[int | None]) -> list[Foretold]:
    """What each call gives, from the calls of several runs with so many samples. Raises Unforetold."""
    if len({len(calls) for calls in runs}) > 1:
        raise Unforetold(piece, "it is called more often for some data than for others")
    return [_call(piece, calls, sizes) for calls in zip(*runs, strict=True)]


def _call(piece: Piece, calls: Sequence[Call], sizes: Sequence[int | None]) -> Foretold:
    first = calls[0]
    if any(call.stray for call in calls):
        raise Unforetold(piece, "it computes on tensors that are no arguments of its own")
    if any(_structure(call) != _structure(first) for call in calls):
        raise Unforetold(piece, "the structure of what it returns depends on the data")
    leaves = zip(*(call.leaves for call in calls), strict=True)
    return Foretold(first.form, tuple(_leaf(piece, leaf, sizes) for leaf in leaves), first)


def _leaf(piece: Piece, seen: Sequence[Any], sizes: Sequence[int | None]) -> Leaf:
    x = seen[0]
    if isinstance(x, Seen):
        if any((len(y.shape), y.dtype) != (len(x.shape), x.dtype) for y in seen):
            raise Unforetold(piece, "the number of dimensions or the dtype of a result depends on the data")
        lengths = zip(*(y.shape for y in seen), strict=True)
        return Leaf(tuple(_size(dim, length, sizes) for dim, length in enumerate(lengths)), x)
    if isinstance(x, bool):
        raise Unforetold(piece, "it returns a bool: Python decides by the data")
    if not isinstance(x, _PLAIN):
        raise Unforetold(piece, f"it returns a {type(x).__name__}")
    if any(x != y and not repr(x) == repr(y) == "nan" for y in seen):
        raise Unforetold(piece, f"it returns a {type(x).__name__} that depends on the data")
    return Leaf((), None, x)


def _size(dim: int, lengths: Sequence[int], sizes: Sequence[int | None]) -> Size:
    ratios = {Fraction(length, size) for length, size in zip(lengths, sizes, strict=True) if size}
    if len(set(sizes)) > 1 and len(ratios) == 1 and lengths[0]:
        return ratios.pop()
    return lengths[0] if dim and len(set(lengths)) == 1 else UNKNOWN
