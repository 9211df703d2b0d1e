"""The divisor of a loss: how many tokens, or how much weight, a mean counts. It is found in the graph that computes the loss.

    cross_entropy(logits, labels)        labels other than `ignore_index`, or the sum of their class weights
    (l * mask).sum() / mask.sum()        mask.sum()

A micro-batch's share of the mini-batch's loss is its divisor over that of the mini-batch. Only divisors are found that depend on
inputs alone, not on parameters: they are known before the forward. Samples may meet before the mean: what counts is the same.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from pipecompile.batching.merging import MergeKind, MergeRule
from pipecompile.batching.microbatches import LossDivisor
from pipecompile.graph.batch_flow import BatchFlow
from pipecompile.graph.batch_rows import batch_dim_of
from pipecompile.graph.merge_laws import has_unknown_size
from pipecompile.graph.module_names import held_tensors
from pipecompile.graph.row_order import word_of
from pipecompile.graph.stages import Stage, extract
from pipecompile.graph.whole_batch import mixing_line
from pipecompile.tracing.node_facts import facts, value_of
from pipecompile.tracing.traced_graph import TracedGraph

__all__ = [
    "COUNTED", "COUNTED_LAYERS", "RATIOS", "SUMS", "computed_from_inputs", "constant_of", "divisor_of", "extracted", "is_scaling", "meeting_before",
    "reshaped_from",
]  # fmt: skip

_SAME = MergeRule(MergeKind.SAME)
_CASTS = ("to", "float", "double", "type", "clone", "contiguous", "view_as", "mean", "sum", "squeeze", "reshape")
_SCALINGS = (*_CASTS, "mul", "truediv", "div", "neg")
_RESHAPES = ("view", "reshape", "flatten", "contiguous", "long", "transpose", "permute")
SUMS = (operator.add, operator.sub, torch.add, torch.sub, "add", "sub")
RATIOS = (operator.truediv, torch.div, "div")
COUNTED: tuple[Any, ...] = (F.cross_entropy, F.nll_loss)
COUNTED_LAYERS = (nn.CrossEntropyLoss, nn.NLLLoss)


@dataclass(frozen=True, slots=True)
class _Count:
    """The count that divides a mean: `end` is a number, per sample if `is_mean`; with `is_target`, class indices.

    `mixed` is the value that the mean takes, if samples meet before it.
    """

    end: fx.Node
    is_target: bool = False
    ignored: int = -100
    weight: fx.Node | torch.Tensor | None = None
    is_mean: bool = False
    mixed: fx.Node | None = field(default=None, compare=False)


def divisor_of(flow: BatchFlow, *terms: fx.Node, has_constant: bool = False) -> LossDivisor | None:
    """Return the divisor of a loss that is the sum of `terms`, and a mean over what counts; None if no such divisor is known.

    All terms must have the same divisor, whose micro-batches add up if there are terms that no sample enters: terms of a sum in
    the graph, or with `has_constant` outside of it.
    """
    counts = _counts_of(flow, terms)
    if counts is None or len(kinds := set(counts) - {None}) != 1:
        return None
    (count,) = kinds
    assert count is not None
    if (has_constant or None in counts) and not count.is_target and flow.rule(count.end).kind is not MergeKind.ADDED:
        return None
    weight = count.weight
    if isinstance(weight, fx.Node) and (weight := constant_of(flow.graph, weight)) is None:
        return None
    if not count.is_target:
        found = extracted(flow.graph, count.end, {})
        return _by_size(found) if count.is_mean and found is not None else found
    return extracted(flow.graph, count.end, {"is_target": True, "ignored": count.ignored, "weight": weight})


def meeting_before(flow: BatchFlow, *terms: fx.Node) -> str:
    """Return the user's line at which samples meet before the means over what counts in a loss, the sum of `terms`; "" if they do not."""
    mixed = [count.mixed for count in _counts_of(flow, terms) or () if count is not None and count.mixed is not None]
    return next((mixing_line(flow, node) for node in mixed), "")


def computed_from_inputs(graph: TracedGraph, node: fx.Node) -> LossDivisor | None:
    """Return the computation of a value from inputs alone; None if parameters, draws or gradients enter."""
    return extracted(graph, node, {})


def _by_size(divisor: LossDivisor) -> LossDivisor | None:
    """Return a mean over the samples as a sum."""
    return None if divisor.compute is None else replace(divisor, compute=partial(_times_size, divisor.compute))


def _times_size(compute: Callable[..., Any], *arguments: Any) -> Any:
    return compute(*arguments) * arguments[-1]


def _counts_of(flow: BatchFlow, terms: Sequence[fx.Node]) -> list[_Count | None] | None:
    """Return what the terms of a loss count, as `_counts` does for one."""
    found = [_counts(flow, term) for term in terms]
    return None if None in found else [count for one in found for count in one or ()]


def _counts(flow: BatchFlow, node: fx.Node) -> list[_Count | None] | None:
    """Return what each term of a loss counts, None for a term that no sample enters; None alone if a term is unknown."""
    while not _is_mean(flow, node) and is_scaling(node):
        node = node.args[0]  # type: ignore[assignment]
    if flow.rules.get(node) == (_SAME,):
        return [None]
    if _is_mean(flow, node):
        return _counted(flow, node)
    terms = node.args[:2]
    if (
        node.target in SUMS
        and not node.kwargs
        and all(isinstance(term, (int, float)) or _is_tensor(term) for term in terms)
    ):
        numbers: list[_Count | None] = [None for term in terms if not isinstance(term, fx.Node)]
        found = _counts_of(flow, [term for term in terms if isinstance(term, fx.Node)])
        return None if found is None else [*numbers, *found]
    if node.target in RATIOS and len(terms) == 2 and all(map(_is_tensor, terms)):
        return _of_ratio(flow, *terms)  # type: ignore[arg-type]
    return None


def _of_ratio(flow: BatchFlow, above: fx.Node, below: fx.Node) -> list[_Count | None] | None:
    """Return the count of a sum over a value, or of the ratio of two means."""
    kinds = [flow.rules[term][0].kind for term in (above, below)]
    if kinds == [MergeKind.AVERAGED] * 2:
        return [_Count(below, is_mean=True)]
    if kinds[0] is MergeKind.ADDED:
        return [_Count(below)]
    source = above.args[0] if word_of(above) == "sum" else None
    is_sum = isinstance(source, fx.Node) and not value_of(above).dim() and _has_rows(flow, source)
    return [_Count(below, mixed=source)] if is_sum and kinds[0] is MergeKind.COMPUTED else None  # type: ignore[arg-type]


def _is_tensor(argument: Any) -> bool:
    return isinstance(argument, fx.Node) and isinstance(value_of(argument), torch.Tensor)


def is_scaling(node: fx.Node) -> bool:
    """Return whether a call has one argument that is a number as a tensor: a cast of it, or a product with a number."""
    if word_of(node) not in _SCALINGS:
        return False
    first = node.args[0] if node.args else None
    is_alone = isinstance(first, fx.Node) and set(node.all_input_nodes) == {first}
    is_one_use = is_alone and sum(argument is first for argument in node.args) == 1
    return is_one_use and bool(value_of(first).dim() == 0)  # type: ignore[arg-type]


def _is_mean(flow: BatchFlow, node: fx.Node) -> bool:
    if node.op == "call_module":
        layer = flow.graph.get_submodule(str(node.target))
        return type(layer) in COUNTED_LAYERS and layer.reduction == "mean"
    is_counted = node.target in COUNTED and len(tuple(node.args)) < 4
    return is_counted and bool(node.kwargs.get("reduction", "mean") == "mean")


def _counted(flow: BatchFlow, node: fx.Node) -> list[_Count | None] | None:
    scores: Any = node.args[0] if node.args else node.kwargs.get("input")
    target: Any = node.kwargs.get("target", node.args[1] if len(node.args) > 1 else None)
    if node.op == "call_module":
        layer: Any = flow.graph.get_submodule(str(node.target))
        weight, ignored = layer.weight, layer.ignore_index
    else:
        weight = node.kwargs.get("weight", node.args[2] if len(node.args) > 2 else None)
        ignored = node.kwargs.get("ignore_index", -100)
    if not isinstance(scores, fx.Node) or not isinstance(target, fx.Node) or not isinstance(ignored, int):
        return None
    if value_of(target).is_floating_point():
        return None
    mixed = None if _are_aligned(flow, scores, target) else scores
    if mixed is not None and not (_has_rows(flow, scores) and _has_rows(flow, target)):
        return None
    return [_Count(reshaped_from(target), is_target=True, ignored=ignored, weight=weight, mixed=mixed)]


def reshaped_from(target: fx.Node) -> fx.Node:
    """Return the value that has the same class indices in another shape: losses of several outputs count the same labels."""
    while word_of(target) in _RESHAPES and isinstance(source := target.args[0], fx.Node):
        if value_of(source).is_floating_point():
            break
        target = source
    return target


def _are_aligned(flow: BatchFlow, scores: fx.Node, target: fx.Node) -> bool:
    """Return whether samples stay apart in scores and target, as rows or moved in the same way from the same dimension."""
    one, other = _rows(flow, scores), _rows(flow, target)
    return None not in (one, other) and (one == other or (one, other) == ("rows", "rows"))


def _has_rows(flow: BatchFlow, node: fx.Node) -> bool:
    """Return whether a value has rows of samples by its shape, or a number of rows that the data decide."""
    value = value_of(node)
    return batch_dim_of(value, flow.symbol) is not None or has_unknown_size(value, flow.symbol)


def _rows(flow: BatchFlow, node: fx.Node) -> Any:
    """Return "rows" for rows of samples, the batch dimension of what was reshaped into another order, or None."""
    if flow.rule(node).kind is MergeKind.JOINED:
        return "rows"
    while word_of(node) in _RESHAPES and isinstance(source := node.args[0], fx.Node):
        if (rule := flow.rule(source)).kind is MergeKind.JOINED:
            return rule.dim
        node = source
    return None


def constant_of(graph: TracedGraph, node: fx.Node) -> torch.Tensor | None:
    """Return a value that neither inputs nor parameters enter; None if they do."""
    if node.op != "get_attr":
        nodes, inputs = _ancestors(node)
        if inputs or any(isinstance(t, nn.Parameter) for one in nodes for t in held_tensors(graph, one)):
            return None
        order = {one: place for place, one in enumerate(graph.graph.nodes)}
        stage = extract(graph, sorted(nodes, key=order.__getitem__), [], [node], torch.device("cpu"))
        return None if stage.sized else stage.module()[0]
    value: Any = graph
    for name in str(node.target).split("."):
        value = getattr(value, name)
    return value if isinstance(value, torch.Tensor) else None


def extracted(graph: TracedGraph, end: fx.Node, form: Mapping[str, Any]) -> LossDivisor | None:
    """Return the divisor whose stage computes `end` from inputs alone; None if parameters or draws enter."""
    nodes, inputs = _ancestors(end)
    if any(facts(n).draws or any(isinstance(t, nn.Parameter) for t in held_tensors(graph, n)) for n in nodes):
        return None
    if not inputs or any(value_of(n).requires_grad for n in (end, *inputs) if isinstance(value_of(n), torch.Tensor)):
        return None
    order = {node: place for place, node in enumerate(graph.graph.nodes)}
    members, given = (sorted(group, key=order.__getitem__) for group in (nodes, inputs))
    stage = extract(graph, members, given, [end], torch.device("cpu")) if members else None
    compute = None if stage is None else partial(_run, stage)
    return LossDivisor(stage.inputs if stage else (end.name,), compute, **form)


def _run(stage: Stage, *arguments: Any) -> Any:
    """Return the only output of a stage; the last argument is the number of samples."""
    (result,) = stage.module(*arguments) if stage.sized else stage.module(*arguments[:-1])
    return result


def _ancestors(end: fx.Node) -> tuple[set[fx.Node], set[fx.Node]]:
    nodes: set[fx.Node] = set()
    inputs: set[fx.Node] = set()
    pending: Sequence[fx.Node] = [end]
    while pending:
        *pending, node = pending
        if node.op == "placeholder":
            inputs.add(node)
        elif node not in nodes and node.op != "get_attr" and not facts(node).is_size:
            nodes.add(node)
            pending = [*pending, *node.all_input_nodes]
    return nodes, inputs
