"""Detect BatchNorm layers that a micro-batch of one sample would leave a single value per channel, which they refuse.

BatchNorm1d on (B, C)              one sample is one value per channel
BatchNorm2d on (B, C, 1, 1)        likewise: behind a global pooling
BatchNorm2d on (B, C, H, W)        H W values per channel
"""

from __future__ import annotations

from math import prod
from typing import Any

import sympy
import torch
import torch.nn.functional as F
from torch import fx, nn

from pipecompile.torch_private.modules import BatchNorm
from pipecompile.tracing.emit.call_description import model_path
from pipecompile.tracing.node_facts import facts, value_of
from pipecompile.tracing.traced_graph import TracedGraph

__all__ = ["has_batch_norm", "single_value_norm"]


def has_batch_norm(model: nn.Module) -> bool:
    """Return whether a BatchNorm layer of the model normalises by the samples of a micro-batch."""
    return any(isinstance(module, BatchNorm) and _by_batch(module) for module in model.modules())


def single_value_norm(graph: TracedGraph) -> str:
    """Return the first layer that gets a single value per channel from one sample; "" if there is none."""
    for node in graph.graph.nodes:
        if _normalises_batch(graph, node) and _values_of_one_sample(graph, node) == 1:
            return model_path(str(node.target)) if node.op == "call_module" else facts(node).module or node.name
    return ""


def _by_batch(norm: BatchNorm) -> bool:
    return norm.training or norm.running_mean is None


def _normalises_batch(graph: TracedGraph, node: fx.Node) -> bool:
    if node.op == "call_module":
        module = graph.get_submodule(str(node.target))
        return isinstance(module, BatchNorm) and _by_batch(module)
    if node.op != "call_function" or node.target is not F.batch_norm:
        return False
    return bool(node.args[5] if len(node.args) > 5 else node.kwargs.get("training"))


def _values_of_one_sample(graph: TracedGraph, node: fx.Node) -> int:
    """Return the number of values per channel that one sample brings to the input of a layer; 0 if it is not known."""
    source = node.args[0] if node.args else node.kwargs.get("input")
    value = value_of(source) if isinstance(source, fx.Node) else None
    if not isinstance(value, torch.Tensor) or value.dim() < 2:
        return 0
    return prod(_of_one_sample(size, graph.facts.symbol) for place, size in enumerate(value.shape) if place != 1)


def _of_one_sample(size: Any, symbol: sympy.Symbol) -> int:
    if not isinstance(size, torch.SymInt):
        return int(size)
    number = sympy.sympify(size.node.expr).subs({symbol: 1})
    return int(number) if number.is_Integer else 0
