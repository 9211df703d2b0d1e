"""The positions of a sequence in the values of a graph, found from two recordings: of whole sequences, and of one slice.

    whole    x (B, 64)    h (B, 64, 32)    q (B, 4, 64, 8)    w (32, 32)
    slice    x (B, 16)    h (B, 16, 32)    q (B, 4, 16, 8)    w (32, 32)
    axis     1            1                2                  none

A reshape may merge positions with samples: in (B * 64, 32) the axis is 0, and positions change fastest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import sympy
import torch
from torch import fx

from pipecompile.tracing.fakes.batch_symbol import expression_of
from pipecompile.tracing.node_facts import leaves_of
from pipecompile.tracing.traced_graph import TracedGraph

__all__ = ["Axis", "SequenceAxes", "UnclearAxisError"]

_SAMPLES = 1009
"""Samples for which shapes are compared: a prime that no other dimension is likely to be a multiple of."""


@dataclass(frozen=True, slots=True)
class Axis:
    """The dimension with the positions. Of a merged dimension, `inner` counts its elements from one position to the next."""

    dim: int
    inner: int = 1


class UnclearAxisError(Exception):
    """A value whose shape does not follow from the length of the sequence in one dimension."""


class SequenceAxes:
    """The axes of the values of two recordings with the same calls: `part` of `length` positions, `whole` of `n_slices` times as many."""

    def __init__(self, part: TracedGraph, whole: TracedGraph, n_slices: int, length: int) -> None:
        self.n_slices, self.length = n_slices, length
        self.twins = dict(zip(part.graph.nodes, whole.graph.nodes, strict=True))
        self._symbols = part.facts.symbol, whole.facts.symbol
        self.axes: dict[fx.Node, list[Axis | None]] = {}

    def shapes(self, node: fx.Node) -> list[tuple[tuple[int, ...], tuple[int, ...]] | None]:
        """Return the shapes of each leaf of a node's value, of a slice and of a whole sequence; None for a leaf that is not a tensor."""
        pairs = zip(leaves_of(node), leaves_of(self.twins[node]), strict=True)
        is_tensor = [(part, whole, isinstance(part, torch.Tensor)) for part, whole in pairs]
        return [(self._shape(part, 0), self._shape(whole, 1)) if known else None for part, whole, known in is_tensor]

    def _shape(self, value: torch.Tensor, place: int) -> tuple[int, ...]:
        symbol = self._symbols[place]
        sizes = [sympy.sympify(expression_of(size)).subs({symbol: _SAMPLES}) for size in value.shape]
        if not all(size.is_Integer for size in sizes):
            raise UnclearAxisError
        return tuple(map(int, sizes))

    def dims(self, node: fx.Node) -> list[int | None]:
        """Return the dimension that grows with the sequence, per leaf of a node's value. Raise UnclearAxisError if there are two."""
        return [None if pair is None else self._dim(*pair) for pair in self.shapes(node)]

    def _dim(self, part: Sequence[int], whole: Sequence[int]) -> int | None:
        if len(part) != len(whole):
            raise UnclearAxisError
        longer = [dim for dim, (one, other) in enumerate(zip(part, whole, strict=True)) if one != other]
        if len(longer) > 1 or any(part[dim] % self.length or part[dim] * self.n_slices != whole[dim] for dim in longer):
            raise UnclearAxisError
        return longer[0] if longer else None

    def of(self, node: fx.Node) -> Axis | None:
        """Return the axis of a node whose value is one tensor; None if its value is the same for all slices."""
        axes = self.axes.get(node, [None])
        return axes[0] if len(axes) == 1 else next((axis for axis in axes if axis is not None), None)

    def reshaped(self, source: fx.Node, node: fx.Node) -> Axis:
        """Return the axis of the reshaped value of `source`: as many elements follow a position as before. Raise UnclearAxisError."""
        axis, dim = self.of(source), self.dims(node)[0]
        if axis is None or dim is None:
            raise UnclearAxisError
        (old, _), (new, _) = self._one(source), self._one(node)
        following = axis.inner * prod(old[axis.dim + 1 :])
        inner, rest = divmod(following, prod(new[dim + 1 :]))
        if rest or not inner or new[dim] % (inner * self.length):
            raise UnclearAxisError
        return Axis(dim, inner)

    def _one(self, node: fx.Node) -> tuple[tuple[int, ...], tuple[int, ...]]:
        (pair,) = self.shapes(node)
        if pair is None:
            raise UnclearAxisError
        return pair

    def size(self, node: fx.Node, dim: int) -> int:
        """Return the size of a dimension of a node's tensor, of a slice."""
        return self._one(node)[0][dim]

    def rank(self, node: fx.Node) -> int:
        """Return the number of dimensions of a node's tensor."""
        return len(self._one(node)[0])
