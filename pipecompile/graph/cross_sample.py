"""Layers and calls by which the samples of a batch meet: their result for one sample depends on others, so micro-batches change it.

nn.LSTM on (B, T, C), batch_first=False     treats the batch as time: certainly a mistake
x @ x.T, (B, B)                             all samples meet: in micro-batches, only those of one micro-batch
BatchNorm1d on (B, C), (B, C, 1, 1)         one sample is one value per channel, which the layer refuses; (B, C, H, W) has H W
SyncBatchNorm of several processes          samples of other processes meet, too
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

import sympy
import torch
import torch.nn.functional as F
from torch import distributed, fx, nn

from pipecompile.errors import InputError
from pipecompile.torch_private.modules import BatchNorm, NormBase, uses_batch_statistics
from pipecompile.torch_private.operators import batch_norm_operators
from pipecompile.tracing.emit.call_description import model_path
from pipecompile.tracing.fakes.batch_symbol import batch_dims_of
from pipecompile.tracing.node_facts import facts, value_of
from pipecompile.tracing.traced_graph import TracedGraph
from pipecompile.tracing.user_source import line_of

__all__ = [
    "check_batch_first",
    "check_sync_batchnorm",
    "cross_sample_lines",
    "has_batch_norm",
    "is_synchronized",
    "norms_by_node",
    "scripted_norms",
    "single_value_norm",
]


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


def has_batch_norm(model: nn.Module) -> bool:
    """Return whether a BatchNorm layer of the model normalises by the samples of a micro-batch."""
    return any(isinstance(module, BatchNorm) and uses_batch_statistics(module) for module in model.modules())


def single_value_norm(graph: TracedGraph) -> str:
    """Return the first layer that gets a single value per channel from one sample; "" if there is none."""
    for node in graph.graph.nodes:
        if _normalises_batch(graph, node) and _values_of_one_sample(graph, node) == 1:
            return model_path(str(node.target)) if node.op == "call_module" else facts(node).module or node.name
    return ""


def _normalises_batch(graph: TracedGraph, node: fx.Node) -> bool:
    if node.op == "call_module":
        module = graph.get_submodule(str(node.target))
        return isinstance(module, BatchNorm) and uses_batch_statistics(module)
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


def check_sync_batchnorm(model: nn.Module, batch_norm: str | None, dispatch: str) -> None:
    """Raise InputError if SyncBatchNorm layers of several processes are deferred, or run in threads, where they may deadlock.

    In one process they are BatchNorm layers like any other.
    """
    norms = ((n, module) for n, module in model.named_modules() if isinstance(module, BatchNorm))
    name = next((n for n, module in norms if is_synchronized(module)), None)
    deferred = batch_norm == "deferred"
    if name is not None and (deferred or dispatch == "threads"):
        raise InputError(
            "a SyncBatchNorm layer of several processes cannot be " + ("deferred" if deferred else "run in threads"),
            where=name,
            why="its statistics are those of other processes too"
            if deferred
            else "the stages of one process may meet those of another in different orders, and wait forever",
            hint="batch_norm='each'" if deferred else "dispatch='inline'",
        )


def is_synchronized(layer: NormBase) -> bool:
    """Return whether the layer exchanges statistics with other processes."""
    if not isinstance(layer, nn.SyncBatchNorm) or not layer.training:
        return False
    group = layer.process_group
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size(group) > 1


def norms_by_node(graph: fx.GraphModule, model: nn.Module) -> dict[fx.Node, NormBase]:
    """Return the nodes that update running statistics, each with its layer: a layer's call, or `F.batch_norm` on its buffers."""
    layers = [layer for layer in model.modules() if isinstance(layer, BatchNorm)]
    owners = {id(layer.running_mean): layer for layer in layers if layer.running_mean is not None}
    norms: dict[fx.Node, NormBase] = {}
    for node in graph.graph.nodes:
        if node.op == "call_module":
            module = graph.get_submodule(str(node.target))
            if isinstance(module, NormBase) and module.training and module.running_mean is not None:
                norms[node] = module
        elif node.op == "call_function" and node.target is F.batch_norm and _argument(node, 5, "training"):
            mean = _argument(node, 1, "running_mean")
            is_buffer = isinstance(mean, fx.Node) and mean.op == "get_attr"
            owner = owners.get(id(_attribute(graph, str(mean.target)))) if is_buffer else None
            if owner is not None:
                norms[node] = owner
    return {node: layer for node, layer in norms.items() if not is_synchronized(layer)}


def scripted_norms(graph: fx.GraphModule, batch_norm: str | None) -> int:
    """Return how many calls of TorchScript update running statistics. Raise InputError if they are to be deferred."""
    calls = [
        node for node in graph.graph.nodes if node.target in batch_norm_operators and _argument(node, 5, "training")
    ]
    if calls and batch_norm == "deferred":
        raise InputError(
            "a BatchNorm layer of TorchScript cannot be deferred",
            where=facts(calls[0]).source,
            why="it runs as a kernel that writes its running statistics, and not as a layer",
            hint="batch_norm='each', or the module without torch.jit.script",
        )
    return len(calls)


def _argument(node: fx.Node, place: int, name: str) -> Any:
    return node.args[place] if len(node.args) > place else node.kwargs.get(name)


def _attribute(module: nn.Module, path: str) -> Any:
    *parents, name = path.split(".")
    return getattr(module.get_submodule(".".join(parents)), name, None)
