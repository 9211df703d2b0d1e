"""Calls that mix samples of a batch: their result for one sample depends on other samples, so micro-batches change it.

nn.LSTM on (B, T, C), batch_first=False     treats the batch as time: certainly a mistake
x @ x.T, (B, B)                             all samples meet: in micro-batches, only those of one micro-batch
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx, nn

from pipecompile.errors import InputError
from pipecompile.graph.row_order import batch_dims_of
from pipecompile.tracing.emit.call_description import model_path
from pipecompile.tracing.node_facts import facts, value_of
from pipecompile.tracing.traced_graph import TracedGraph
from pipecompile.tracing.user_source import line_of

__all__ = ["check_batch_first", "cross_sample_lines"]


def cross_sample_lines(graph: TracedGraph) -> list[str]:
    """Return the user's lines at which all samples meet: values with the batch in two dimensions."""
    symbol = graph.facts.symbol
    return [
        line_of(facts(node).source) or node.name
        for node in graph.graph.nodes
        if isinstance(value := value_of(node), torch.Tensor) and len(batch_dims_of(value, symbol)) > 1
    ]


def check_batch_first(graph: TracedGraph) -> None:
    """Raise InputError for a recurrent or attention layer that treats the batch as time: a micro-batch would cut all sequences."""
    for node, module in _sequential(graph):
        value = value_of(node.args[0]) if node.args and isinstance(node.args[0], fx.Node) else None
        if isinstance(value, torch.Tensor) and _time_is_batch(module, value, graph):
            names = [name for name, dim in zip(graph.facts.names, graph.facts.dims, strict=True) if dim == 0]
            moved = ", ".join(f'"{name}": 1' for name in names)
            kind = type(module).__name__
            raise InputError(
                f"{model_path(str(node.target))} takes the batch for time: micro-batches would cut the sequences",
                where=facts(node).source,
                why=f"{kind}(batch_first={module.batch_first}) gets {value.dim()} dimensions, of which the first is the batch",
                hint=f"batch_dims={{{moved}}} if the batch is dimension 1; {kind}(batch_first=True) if it is 0",
            )


def _sequential(graph: TracedGraph) -> Iterator[tuple[fx.Node, nn.RNNBase | nn.MultiheadAttention]]:
    for node in graph.graph.nodes:
        module = graph.get_submodule(node.target) if node.op == "call_module" else None
        if isinstance(module, (nn.RNNBase, nn.MultiheadAttention)):
            yield node, module


def _time_is_batch(module: nn.RNNBase | nn.MultiheadAttention, value: torch.Tensor, graph: TracedGraph) -> bool:
    dims = [dim for dim, _ in batch_dims_of(value, graph.facts.symbol)]
    return dims == [0] and (value.dim() == 2 or not module.batch_first)
