"""The output of a model as its loss function gets it: the form of each tensor, for any number of samples.

logits (3B, 5), JOINED 0       three rows per sample
mask (B, 3), from the inputs   its values are known before the forward
aux (), AVERAGED               a number of every micro-batch
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch import fx

from pipecompile.batching.merging import MergeKind, MergeRule
from pipecompile.batching.microbatches import LossDivisor
from pipecompile.graph.batch_flow import MERGED
from pipecompile.graph.loss_divisors import computed_from_inputs
from pipecompile.torch_private import pytree
from pipecompile.tracing.node_facts import value_of
from pipecompile.tracing.traced_graph import TracedGraph

__all__ = ["LossOutputs"]


@dataclass(frozen=True, slots=True)
class LossOutputs:
    """The leaves of an output in pytree order. `rules` merges them; `places` are those of the tensors.

    `known` has the computation of a leaf that depends on inputs alone, by place.
    """

    spec: pytree.TreeSpec
    values: Sequence[Any]
    rules: Sequence[MergeRule]
    symbol: sympy.Symbol
    batch_size: int | None
    known: Mapping[int, LossDivisor] = field(default_factory=dict)

    @classmethod
    def of(cls, graph: TracedGraph, rules: Sequence[MergeRule]) -> LossOutputs:
        """Return the outputs of a graph."""
        node = graph.graph.output_node()
        arguments: Any = node.args[0]
        values = value_of(node)
        known: dict[int, LossDivisor] = {}
        for place, (argument, value) in enumerate(zip(arguments, values, strict=True)):
            is_plain = isinstance(argument, fx.Node) and isinstance(value, torch.Tensor) and not value.requires_grad
            is_free = graph.facts.batch_size is None
            if is_free and is_plain and (found := computed_from_inputs(graph, argument)) is not None:
                known[place] = found
        return cls(graph.facts.out_spec, values, rules, graph.facts.symbol, graph.facts.batch_size, known)

    @property
    def places(self) -> tuple[int, ...]:
        """The places of the tensors."""
        return tuple(place for place, value in enumerate(self.values) if isinstance(value, torch.Tensor))

    @property
    def is_merged(self) -> bool:
        """Whether every tensor of the mini-batch follows from those of the micro-batches."""
        return all(self.is_usable(place) for place in self.places)

    @property
    def has_gradients_merged(self) -> bool:
        """Whether every tensor with a gradient of the mini-batch follows from those of the micro-batches."""
        return all(self.is_usable(place) for place in self.places if self.values[place].requires_grad)

    def is_usable(self, place: int) -> bool:
        """Return whether a tensor merges, with a whole number of rows per sample."""
        rule = self.rules[place]
        if rule.kind not in MERGED:
            return False
        if rule.kind is not MergeKind.JOINED:
            return all(isinstance(length, int) for length in self.values[place].shape)
        try:
            return self.rows(place) > 0 and all(
                self.shape(place, n)[rule.dim or 0] == n * self.rows(place) for n in (2, 3)
            )
        except TypeError:  # a length that the data decide
            return False

    def is_recordable(self, place: int) -> bool:
        """Return whether a tensor has a known shape for any number of samples: it merges, or has no rows of samples."""
        is_plain = all(isinstance(length, int) for length in self.values[place].shape)
        return self.is_usable(place) or (is_plain and self.rules[place].kind is MergeKind.COMPUTED)

    def rows(self, place: int) -> int:
        """Return the rows per sample of a JOINED tensor."""
        return self.shape(place, 1)[self.rules[place].dim or 0]

    def shape(self, place: int, samples: int) -> list[int]:
        """Return the shape of a tensor for `samples` samples. Raise TypeError if the data decide it."""
        dim = self.rules[place].dim
        shape = [self._length(length, samples) for length in self.values[place].shape]
        if self.batch_size is not None and dim is not None:
            shape[dim] = shape[dim] * samples // self.batch_size
        return shape

    def _length(self, length: Any, samples: int) -> int:
        expression = length.node.expr if isinstance(length, torch.SymInt) else length
        return int(sympy.sympify(expression).subs({self.symbol: samples}))

    def output(self, tensors: Sequence[torch.Tensor], samples: int) -> Any:
        """Return the output with these tensors, of `samples` samples."""
        values = [_number(value, self.symbol, samples) for value in self.values]
        for place, tensor in zip(self.places, tensors, strict=True):
            values[place] = tensor
        return pytree.tree_unflatten(values, self.spec)


def _number(value: Any, symbol: sympy.Symbol, samples: int) -> Any:
    if not isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return value
    return value.node.pytype(sympy.sympify(value.node.expr).subs({symbol: samples}))
