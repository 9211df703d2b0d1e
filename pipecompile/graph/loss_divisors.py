"""The divisor of a loss: how many tokens, or how much weight, a mean counts. It is found in the graph that computes the loss.

    cross_entropy(logits, labels)        labels other than `ignore_index`, or the sum of their class weights
    (l * mask).sum() / mask.sum()        mask.sum()

A micro-batch's share of the mini-batch's loss is its divisor over that of the mini-batch. Only divisors are found that depend on
inputs alone, not on parameters: they are known before the forward.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from pipecompile.batching.merging import MergeKind
from pipecompile.batching.microbatches import LossDivisor
from pipecompile.graph.batch_flow import BatchFlow
from pipecompile.graph.module_names import held_tensors
from pipecompile.graph.row_order import word_of
from pipecompile.graph.stages import Stage, extract
from pipecompile.tracing.node_facts import facts, value_of

__all__ = ["divisor_of"]

_CASTS = ("to", "float", "double", "type", "clone", "contiguous", "view_as", "mean", "squeeze", "reshape")
_COUNTED: tuple[Any, ...] = (F.cross_entropy, F.nll_loss)
_COUNTED_LAYERS = (nn.CrossEntropyLoss, nn.NLLLoss)


def divisor_of(flow: BatchFlow, loss: fx.Node) -> LossDivisor | None:
    """Return the divisor of a loss whose value is a mean over what counts; None if no such divisor is known."""
    node = loss
    while not _is_mean(flow, node) and word_of(node) in (*_CASTS, "mul", "truediv", "div") and _is_scaling(node):
        node = node.args[0]  # type: ignore[assignment]
    if _is_mean(flow, node):
        return _counted(flow, node)
    if node.target in (operator.truediv, torch.div, "div") and len(node.all_input_nodes) > 1:
        above, below = node.args[:2]
        if isinstance(above, fx.Node) and isinstance(below, fx.Node) and flow.rules[above][0].kind is MergeKind.ADDED:
            return _extracted(flow, below, {})
    return None


def _is_scaling(node: fx.Node) -> bool:
    """Return whether a call has one argument that is a value: a cast, or a product with a number."""
    first = node.args[0] if node.args else None
    is_alone = isinstance(first, fx.Node) and set(node.all_input_nodes) == {first}
    return is_alone and bool(value_of(first).dim() == 0)  # type: ignore[arg-type]


def _is_mean(flow: BatchFlow, node: fx.Node) -> bool:
    if node.op == "call_module":
        layer = flow.graph.get_submodule(str(node.target))
        return isinstance(layer, _COUNTED_LAYERS) and layer.reduction == "mean"
    is_counted = node.target in _COUNTED and len(tuple(node.args)) < 4
    return is_counted and bool(node.kwargs.get("reduction", "mean") == "mean")


def _counted(flow: BatchFlow, node: fx.Node) -> LossDivisor | None:
    target: Any = node.kwargs.get("target", node.args[1] if len(node.args) > 1 else None)
    if node.op == "call_module":
        layer: Any = flow.graph.get_submodule(str(node.target))
        weight, ignored = layer.weight, layer.ignore_index
    else:
        given: Any = node.kwargs.get("weight", node.args[2] if len(node.args) > 2 else None)
        weight = _constant(flow, given) if isinstance(given, fx.Node) else None
        ignored = node.kwargs.get("ignore_index", -100)
        if isinstance(given, fx.Node) and weight is None:
            return None
    if not isinstance(target, fx.Node) or value_of(target).is_floating_point() or not isinstance(ignored, int):
        return None
    return _extracted(flow, target, {"is_target": True, "ignored": ignored, "weight": weight})


def _constant(flow: BatchFlow, node: fx.Node) -> torch.Tensor | None:
    if node.op != "get_attr":
        nodes, inputs = _ancestors(node)
        if inputs or any(isinstance(t, nn.Parameter) for one in nodes for t in held_tensors(flow.graph, one)):
            return None
        order = {one: place for place, one in enumerate(flow.graph.graph.nodes)}
        stage = extract(flow.graph, sorted(nodes, key=order.__getitem__), [], [node], torch.device("cpu"))
        return None if stage.sized else stage.module()[0]
    value: Any = flow.graph
    for name in str(node.target).split("."):
        value = getattr(value, name)
    return value if isinstance(value, torch.Tensor) else None


def _extracted(flow: BatchFlow, end: fx.Node, form: Mapping[str, Any]) -> LossDivisor | None:
    """Return the divisor whose stage computes `end` from inputs alone; None if parameters or draws enter."""
    nodes, inputs = _ancestors(end)
    graph = flow.graph
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
