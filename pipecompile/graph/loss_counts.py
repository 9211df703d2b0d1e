"""The count of a loss: how many values a mean over samples divides by, as a number that can be compared between recordings.

    mse_loss(y, t), y (B, 17, C)         17 * C * B        so that micro-batches of other lengths get their shares
    l.mean(1).mean(0), l (B, 17)         B                 each sample counts once
    cross_entropy(logits, labels)        labels that are not ignored
    (l * mask).sum() / mask.sum()        mask.sum()

The graph is walked from the loss back to the call that reduces the samples. A micro-batch's share of the loss is its count over the
sum of all counts.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import sympy
import torch
import torch.nn.functional as F
from torch import fx, nn

from pipecompile.batching.microbatches import LossDivisor
from pipecompile.graph.loss_divisors import (
    COUNTED,
    COUNTED_LAYERS,
    RATIOS,
    SUMS,
    constant_of,
    extracted,
    is_scaling,
    reshaped_from,
)
from pipecompile.graph.row_order import word_of
from pipecompile.tracing.fakes.batch_symbol import batch_dims_of, expression_of
from pipecompile.tracing.node_facts import value_of
from pipecompile.tracing.traced_graph import TracedGraph

__all__ = ["loss_count"]

_SIZES = (2, 3, 7)
"""Samples for which counts of two terms are compared."""


_EPSILON = 1e-4
"""A number that is added to a divisor to keep it from 0, and does not count."""

_MEANS = ("mean", "batchmean")
_LAYERS = nn.MSELoss.__module__


@dataclass(frozen=True, slots=True)
class _Factor:
    """A part of a count: labels, a value computed from inputs, or a number of elements. `key` is equal for equal parts."""

    key: Any
    divisor: LossDivisor | None = None
    number: Callable[[int], float] | None = None


def loss_count(graph: TracedGraph, *losses: fx.Node) -> LossDivisor | None:
    """Return the count of a loss, the sum of `losses`; None if it is not a mean over samples, or over what is not known before the forward.

    Terms of a sum must have the same count; terms that no sample enters have none.
    """
    counts = _Walk(graph).all_terms(losses)
    known = {tuple(factor.key for factor in count): count for count in counts or () if count is not None}
    if counts is None or len(known) != 1:
        return None
    (factors,) = known.values()
    computed = [factor.divisor for factor in factors if factor.divisor is not None]
    numbers = [factor.number for factor in factors if factor.number is not None]
    if len(computed) > 1:
        return None
    if not computed:
        return LossDivisor((), partial(_product, numbers))
    if not numbers:
        return computed[0]
    divisor = computed[0]
    return LossDivisor(divisor.inputs, partial(_scaled, divisor, numbers))


def _product(numbers: Sequence[Callable[[int], float]], size: int) -> float:
    result = 1.0
    for number in numbers:
        result *= number(size)
    return result


def _scaled(divisor: LossDivisor, numbers: Sequence[Callable[[int], float]], *arguments: Any) -> Any:
    """Return the divisor of inputs, times numbers of elements; the last argument is the number of samples."""
    *given, size = arguments
    return divisor.of(dict(zip(divisor.inputs, given, strict=True)), size) * _product(numbers, size)


class _Walk:
    """The walk through one graph. Counts are lists of factors; None is a term that no sample enters."""

    def __init__(self, graph: TracedGraph) -> None:
        self.graph, self.symbol = graph, graph.facts.symbol

    def all_terms(self, terms: Sequence[Any]) -> list[tuple[_Factor, ...] | None] | None:
        """Return the count of each term of a sum, as `terms` does."""
        found = [self.terms(term) if isinstance(term, fx.Node) else [None] for term in terms]
        return None if None in found else [count for one in found for count in one or ()]

    def terms(self, node: fx.Node) -> list[tuple[_Factor, ...] | None] | None:
        """Return the count of each term of a loss; None alone if a term is unknown."""
        if not self._takes_samples(node):
            return [None]
        if (factors := self._mean(node)) is not None:
            return [factors]
        if is_scaling(node):
            return self.terms(node.args[0])  # type: ignore[arg-type]
        return self.all_terms(node.args[:2]) if node.target in SUMS and not node.kwargs else None

    def _takes_samples(self, node: fx.Node) -> bool:
        """Return whether an input enters the value."""
        seen: set[fx.Node] = set()
        pending = [node]
        while pending:
            one = pending.pop()
            if one.op == "placeholder":
                return True
            if one not in seen:
                seen.add(one)
                pending += one.all_input_nodes
        return False

    def _mean(self, node: fx.Node) -> tuple[_Factor, ...] | None:
        """Return the factors of the count of a call that takes a mean; None for another call."""
        if node.target in COUNTED or (node.op == "call_module" and type(self._layer(node)) in COUNTED_LAYERS):
            return self._labels(node)
        if word_of(node) == "mean" and not node.kwargs.get("dtype") and isinstance(node.args[0], fx.Node):
            return self._plain_mean(node, node.args[0])
        if node.target in RATIOS and len(node.args) == 2 and isinstance(node.args[0], fx.Node):
            return self._ratio(node.args[0], node.args[1])
        return self._reduction(node)

    def _plain_mean(self, node: fx.Node, source: fx.Node) -> tuple[_Factor, ...] | None:
        sizes = [_elements(value_of(one), self.symbol) for one in (source, node)]
        if None in sizes:
            return None
        factor = self._number(sizes[0] / sizes[1])
        if batch_dims_of(value_of(source), self.symbol) or not self._has_symbol(source):
            return (factor,)
        inner = self._mean(source)  # the samples were reduced before
        return None if inner is None else (factor, *inner)

    def _has_symbol(self, node: fx.Node) -> bool:
        """Return whether a value behind a node has the batch size in its shape."""
        return any(
            isinstance(value_of(one), torch.Tensor) and bool(batch_dims_of(value_of(one), self.symbol))
            for one in self._behind(node)
        )

    def _behind(self, node: fx.Node) -> set[fx.Node]:
        seen: set[fx.Node] = set()
        pending = [node]
        while pending:
            one = pending.pop()
            if one not in seen:
                seen.add(one)
                pending += one.all_input_nodes
        return seen

    def _ratio(self, above: fx.Node, below: Any) -> tuple[_Factor, ...] | None:
        """Return the count of a sum divided by a size or by a value computed from inputs, or of a ratio of means."""
        kind = word_of(above)
        if not isinstance(below, fx.Node) or kind not in ("sum", "mean"):
            return None
        if not isinstance(value_of(below), torch.Tensor):
            expression = sympy.sympify(value_of(below).node.expr) if hasattr(value_of(below), "node") else None
            return (self._number(expression),) if expression is not None and kind == "sum" else None
        inner, floor = _without_floor(below) if kind == "sum" else (below, 0.0)
        divisor = extracted(self.graph, inner, {"floor": floor})
        if divisor is None or value_of(below).dim() != 0 or (kind == "sum" and not _adds(inner)):
            return None
        factor = _Factor(("node", _form(below)), divisor)
        if kind == "sum":
            return (factor,)
        mean = self._plain_mean(above, above.args[0])  # type: ignore[arg-type]
        return None if mean is None else (factor, *mean)

    def _labels(self, node: fx.Node) -> tuple[_Factor, ...] | None:
        """Return the count of a loss of class indices: those that are not ignored, with the weights of their classes."""
        layer = self._layer(node) if node.op == "call_module" else None
        target: Any = node.kwargs.get("target", node.args[1] if len(node.args) > 1 else None)
        if not isinstance(target, fx.Node) or len(node.args) > 3:
            return None
        if value_of(target).is_floating_point():
            return self._reduction(node)
        given = node.kwargs if layer is None else vars(layer) | {"weight": layer.weight}
        if given.get("reduction", "mean") != "mean":
            return None
        ignored = given.get("ignore_index", -100)
        weight = given.get("weight", node.args[2] if len(node.args) > 2 else None)
        if isinstance(weight, fx.Node) and (weight := constant_of(self.graph, weight)) is None:
            return None
        target = reshaped_from(target)
        form = {"is_target": True, "ignored": ignored, "weight": weight}
        divisor = extracted(self.graph, target, form)
        return None if divisor is None else (_Factor(("labels", _form(target), ignored, id(weight)), divisor),)

    def _reduction(self, node: fx.Node) -> tuple[_Factor, ...] | None:
        """Return the count of a loss of torch with `reduction="mean"`: the elements that it has without a reduction."""
        if (unreduced := self._unreduced(node)) is None:
            return None
        values = tuple(unreduced(size) for size in _SIZES)
        return None if None in values else (_Factor(("number", values), None, unreduced),)  # type: ignore[arg-type]

    def _unreduced(self, node: fx.Node) -> Callable[[int], float | None] | None:
        if node.op == "call_module":
            layer = copy.copy(self._layer(node))
            if type(layer).__module__ != _LAYERS or (kind := layer.reduction) not in _MEANS:
                return None
            layer.reduction = "none"
            return partial(_counted, layer, node.args, node.kwargs, self.symbol, kind)
        if not callable(node.target) or getattr(F, word_of(node), None) is not node.target:
            return None
        try:
            bound = inspect.signature(node.target).bind(*node.args, **node.kwargs)
        except (TypeError, ValueError):
            return None
        parameter = inspect.signature(node.target).parameters.get("reduction")
        kind = None if parameter is None else bound.arguments.get("reduction", parameter.default)
        if kind not in _MEANS:
            return None
        bound.arguments["reduction"] = "none"
        return partial(_counted, node.target, bound.args, bound.kwargs, self.symbol, kind)

    def _layer(self, node: fx.Node) -> Any:
        return self.graph.get_submodule(str(node.target))

    def _number(self, expression: Any) -> _Factor:
        expression = sympy.sympify(expression)

        def number(size: int) -> float:
            return float(expression.subs({self.symbol: size}))

        return _Factor(("number", tuple(map(number, _SIZES))), None, number)


def _form(node: fx.Node) -> Any:
    """Return a key of the computation behind a node: calls with equal arguments have equal keys."""
    if node.op in ("placeholder", "get_attr"):
        return node.op, str(node.target)
    arguments = fx.node.map_arg((tuple(node.args), dict(node.kwargs)), lambda one: _form(one))
    return node.op, word_of(node), repr(arguments)


def _without_floor(node: fx.Node) -> tuple[fx.Node, float]:
    """Return the value that a call limits from below, and the limit; the node itself and 0 for another call."""
    source, limit = node.args[0] if node.args else None, node.kwargs.get("min", (*node.args, None, None)[1])
    is_limit = word_of(node) in ("clamp", "clamp_min") and "max" not in node.kwargs and len(node.args) < 3
    if is_limit and isinstance(source, fx.Node) and isinstance(limit, (int, float)):
        return source, float(limit)
    return node, 0.0


def _adds(node: fx.Node) -> bool:
    """Return whether a value computed from inputs adds up over micro-batches: sums, and what casts, scales and adds them."""
    if word_of(node) in ("sum", "nansum", "count_nonzero"):
        return True
    terms = [term for term in node.args if isinstance(term, fx.Node)]
    if node.target in SUMS:
        numbers = [term for term in node.args if isinstance(term, (int, float))]
        return all(abs(number) <= _EPSILON for number in numbers) and bool(terms) and all(map(_adds, terms))
    return is_scaling(node) and _adds(terms[0])


def _elements(value: Any, symbol: sympy.Symbol) -> Any:
    """Return the number of elements as an expression of the batch size; None if the data decide it."""
    if not isinstance(value, torch.Tensor):
        return None
    lengths = [expression_of(length) for length in value.shape]
    return None if any(length.free_symbols - {symbol} for length in lengths) else sympy.prod(lengths)


def _counted(function: Any, args: Any, kwargs: Any, symbol: sympy.Symbol, kind: str, size: int) -> float | None:
    """Return the elements, or for "batchmean" the rows, of a loss without reduction, of `size` samples, without values."""

    def of_size(argument: Any) -> Any:
        if not isinstance(argument, fx.Node):
            return argument
        value = value_of(argument)
        if not isinstance(value, torch.Tensor):
            return int(sympy.sympify(value.node.expr).subs({symbol: size})) if hasattr(value, "node") else value
        shape = [int(sympy.sympify(expression_of(length)).subs({symbol: size})) for length in value.shape]
        return torch.empty(shape, dtype=value.dtype, device="meta")

    try:
        with torch.no_grad():
            result = function(*fx.node.map_arg(tuple(args), of_size), **fx.node.map_arg(dict(kwargs), of_size))
    except (TypeError, ValueError, RuntimeError, NotImplementedError):
        return None
    return float(result.numel() if kind == "mean" else len(result))
