"""Rules to merge each output of a model from the outputs of micro-batches, derived from the graph.

(B, C), (T, B), (3B, C)     concatenated along the batch dimension, if the rows of each sample are adjacent
a sum over the batch        added
a mean, any other number    averaged, weighted by the sizes of the micro-batches
independent of the samples   the value of any micro-batch
a list, one entry a sample  concatenated as a list
(B, B), B + 1 rows ...      refused if there is more than one micro-batch
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sympy
import torch
from torch import fx

from pipecompile.batching.microbatches import MergeKind, MergeRule
from pipecompile.graph.row_order import batch_dims_of, by_sample, rows_each, word_of
from pipecompile.tracing.node_facts import facts, value_of
from pipecompile.tracing.traced_graph import TracedGraph

__all__ = ["join_rules"]

_COUNTS = ("sum", "count_nonzero", "bincount", "histc", "nansum")
_MEANS = ("mean", "nanmean", "cross_entropy", "nll_loss", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "kl_div",
          "binary_cross_entropy", "binary_cross_entropy_with_logits")  # fmt: skip
_CASTS = ("to", "type", "float", "double", "half", "bfloat16", "int", "long", "clone", "detach", "contiguous", "view_as",
          "reshape", "view", "squeeze", "unsqueeze", "neg")  # fmt: skip


def join_rules(graph: TracedGraph, other: TracedGraph | None = None, *, mean: bool = True) -> tuple[MergeRule, ...]:
    """One MergeRule per leaf of the output. `other` is a recording for another batch size, where each is for one size alone:
    what differs is the batch. `mean` is how a number is joined when the graph does not show whether it is a mean.
    """
    node = graph.graph.output_node()
    arguments: Any = node.args[0]
    values = value_of(node)
    size = graph.facts.batch_size
    if size is not None and any(dim is not None for dim in graph.facts.dims):
        return _fixed(graph, size, arguments, values, other, mean=mean)
    sampled, symbol = _sampled(graph), graph.facts.symbol
    return tuple(_join(a, v, symbol, sampled, mean=mean) for a, v in zip(arguments, values, strict=True))


def _join(argument: Any, value: Any, symbol: sympy.Symbol, sampled: set[fx.Node], *, mean: bool) -> MergeRule:
    if not isinstance(value, torch.Tensor):
        return _refused("it is a number that depends on the data") if argument in sampled else MergeRule(MergeKind.SAME)
    batched = batch_dims_of(value, symbol)
    if not batched and argument in sampled and any(isinstance(size, torch.SymInt) for size in value.shape):
        return _refused("its size depends on the data")
    if not batched:
        return _reduced(argument, value, symbol, mean=mean) if argument in sampled else MergeRule(MergeKind.SAME)
    if len(batched) > 1:
        return _refused("it has the batch in two dimensions, so every sample meets every other")
    ((dim, size),) = batched
    if rows_each(size, symbol) is None:
        return _refused(
            f"it has {str(size).replace(str(symbol), 'batch_size')} rows, not a whole number for each sample"
        )
    if not by_sample(argument, symbol):
        return _refused("the rows of a sample are not known to be together")
    return MergeRule(MergeKind.JOINED, dim)


def _refused(why: str) -> MergeRule:
    return MergeRule(MergeKind.REFUSED, reason=why)


def _reduced(node: fx.Node, value: torch.Tensor, symbol: sympy.Symbol, *, mean: bool) -> MergeRule:
    word = _reduction(node, symbol)
    if not (value.is_floating_point() or value.is_complex()):
        return (
            MergeRule(MergeKind.ADDED)
            if word == "sum"
            else _refused("it is a whole number that is no sum over the samples")
        )
    return MergeRule(MergeKind.ADDED if (word or ("mean" if mean else "sum")) == "sum" else MergeKind.AVERAGED)


def _reduction(node: fx.Node, symbol: sympy.Symbol) -> str | None:
    """Return "sum" or "mean" for a value without a batch dimension, by how the samples were reduced; None if unknown."""
    word = word_of(node)
    sources = [source for source in node.all_input_nodes if isinstance(value_of(source), torch.Tensor)]
    here = any(batch_dims_of(value_of(source), symbol) for source in sources)
    if node.op == "call_module":
        root = node.graph.owning_module
        assert root is not None
        kept = getattr(root.get_submodule(str(node.target)), "reduction", None) if here else None
        return kept if kept in ("sum", "mean") else None
    if here and word in _COUNTS:
        return "sum"
    if here and word in _MEANS:
        return "sum" if node.kwargs.get("reduction") == "sum" else "mean"
    scaled = word in ("mul", "div", "truediv") and all(isinstance(a, (int, float)) for a in node.args[1:])
    passed = word in _CASTS or word in _COUNTS or word in _MEANS or scaled
    return _reduction(sources[0], symbol) if passed and sources and not here else None


def _sampled(graph: TracedGraph) -> set[fx.Node]:
    """Return the nodes that depend on samples, through arguments or through memory written in place. Sizes do not count."""
    placeholders = [node for node in graph.graph.nodes if node.op == "placeholder"]
    found = {node for node, dim in zip(placeholders, graph.facts.dims, strict=True) if dim is not None}
    written: set[int] = set()
    owned = {key for node in graph.graph.nodes if node.op == "get_attr" for key in facts(node).storages}
    for node in graph.graph.nodes:
        if not facts(node).is_size and any(source in found for source in node.all_input_nodes):
            found.add(node)
            written |= facts(node).mutates - owned
    return found | {node for node in graph.graph.nodes if facts(node).storages & written}


# -- recordings for one batch size alone ----------------------------------------------------------------------------


def _fixed(
    graph: TracedGraph,
    size: int,
    arguments: Sequence[Any],
    values: Sequence[Any],
    other: TracedGraph | None,
    *,
    mean: bool,
) -> tuple[MergeRule, ...]:
    sampled = _sampled(graph)
    if other is None:
        return tuple(_guessed(a, v, size, sampled, mean=mean) for a, v in zip(arguments, values, strict=True))
    if _per_sample(graph) and _per_sample(other):
        return (MergeRule(MergeKind.LISTED),) * len(values)
    if other.facts.out_spec != graph.facts.out_spec:
        refusal = _refused("it is in a list whose length depends on the batch size")
        return tuple(refusal if argument in sampled else MergeRule(MergeKind.SAME) for argument in arguments)
    others = value_of(other.graph.output_node())
    ratio = sympy.Rational(other.facts.batch_size, size)
    return tuple(
        _compared(a, v, o, ratio, sampled, mean=mean) for a, v, o in zip(arguments, values, others, strict=True)
    )


def _per_sample(graph: TracedGraph) -> bool:
    """Return whether the output is a list with one entry per sample."""
    spec = graph.facts.out_spec
    return spec.type is list and spec.num_children == graph.facts.batch_size


def _compared(argument: Any, value: Any, other: Any, ratio: Any, sampled: set[fx.Node], *, mean: bool) -> MergeRule:
    if not isinstance(value, torch.Tensor):
        return (
            MergeRule(MergeKind.SAME) if value == other else _refused("it is a number that depends on the batch size")
        )
    changed = [dim for dim in range(value.dim()) if value.shape[dim] != other.shape[dim]]
    if not changed:
        return _number(argument, value, sampled, mean=mean)
    if len(changed) > 1 or other.shape[changed[0]] != value.shape[changed[0]] * ratio:
        return _refused("its size is no multiple of the batch size in one dimension")
    return MergeRule(MergeKind.JOINED, changed[0])


def _guessed(argument: Any, value: Any, size: int, sampled: set[fx.Node], *, mean: bool) -> MergeRule:
    """Return the rule without another recording: the first dimension as long as the batch counts as the batch."""
    if not isinstance(value, torch.Tensor) or (argument not in sampled) or not value.dim():
        return _number(argument, value, sampled, mean=mean)
    dim = next((dim for dim, length in enumerate(value.shape) if length == size), None)
    return _refused("it has no dimension as long as the batch") if dim is None else MergeRule(MergeKind.JOINED, dim)


def _number(argument: Any, value: Any, sampled: set[fx.Node], *, mean: bool) -> MergeRule:
    if argument not in sampled:
        return MergeRule(MergeKind.SAME)
    return _reduced(argument, value, sympy.Symbol("batch"), mean=mean)
