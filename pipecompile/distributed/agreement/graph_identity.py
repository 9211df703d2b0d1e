"""The contents of recorded graphs that ranks compare: a model of another width, layer or constant on one rank is told before it trains.

    nodes        name, operation, inputs             as in a plan
    layers       class and settings of each layer, shapes and dtypes of parameters and buffers
    constants    numbers and texts among the arguments; no devices, which differ between ranks

Numbers are left out where copies of the pipeline may have parts of the batch of other sizes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx, nn

from pipecompile.graph.cut_transfer import fingerprint, node_lines
from pipecompile.text.units import counted
from pipecompile.torch_private import pytree
from pipecompile.tracing.node_facts import facts

__all__ = ["graph_identity", "graph_parts"]


def graph_identity(graph: fx.GraphModule, *, with_numbers: bool, constants: bool = True) -> str:
    """Return a text that is equal for equal graphs, with a hash of each kind of content; without `constants` those do not count."""
    nodes, layers, leaves = (
        node_lines(graph),
        [*_layers(graph), *_tensors(graph)],
        [*_constants(graph, with_numbers=with_numbers)] if constants else [],
    )
    return (
        f"{counted(len(nodes), 'node')} (fingerprint {fingerprint(nodes)}, layers and shapes {fingerprint(layers)[:8]}, "
        f"constants {fingerprint(leaves)[:8]})"
    )


def graph_parts(graph: fx.GraphModule, *, with_numbers: bool) -> dict[str, str]:
    """Return, per module that makes calls, what it does, as text: a layer of torch with its settings, or its calls with their constants."""
    layers, constants = (
        {line.split(" ", 1)[0]: line for line in lines}
        for lines in (_layers(graph), _constants(graph, with_numbers=with_numbers))
    )
    parts: dict[str, list[str]] = {}
    for node in graph.graph.nodes:
        if node.op in ("placeholder", "output", "get_attr"):
            continue
        path = str(node.target) if node.op == "call_module" else facts(node).module
        call = (
            layers.get(node.name)
            or f"_ {node.target if isinstance(node.target, str) else getattr(node.target, '__name__', '')}"
        )
        texts = (text.split(" ", 1)[1] for text in (call, constants.get(node.name)) if text)
        parts.setdefault(path, []).append(" ".join(texts))
    return {path: ", ".join(calls) for path, calls in parts.items()} | _shapes(graph)


def _shapes(graph: fx.GraphModule) -> dict[str, str]:
    return dict(line.split(" ", 1) for line in _tensors(graph))


def _layers(graph: fx.GraphModule) -> Iterator[str]:
    """Yield the class of each layer that is a node; of layers of torch with their settings."""
    for node in graph.graph.nodes:
        if node.op == "call_module":
            layer: nn.Module = graph.get_submodule(str(node.target))
            is_torchs = type(layer).__module__.startswith("torch.nn.")
            yield f"{node.name} {type(layer).__qualname__}({layer.extra_repr() if is_torchs else ''})"


def _tensors(graph: fx.GraphModule) -> Iterator[str]:
    for name, tensor in (*graph.named_parameters(), *graph.named_buffers()):
        is_known = not nn.parameter.is_lazy(tensor)
        yield f"{name} {tuple(tensor.shape) if is_known else ()} {tensor.dtype}"


def _constants(graph: fx.GraphModule, *, with_numbers: bool) -> Iterator[str]:
    kinds = (bool, str, torch.dtype, *((int, float, complex) if with_numbers else ()))
    for node in graph.graph.nodes:
        found: list[Any] = [leaf for leaf in pytree.tree_leaves((node.args, node.kwargs)) if isinstance(leaf, kinds)]
        if found:
            yield f"{node.name} {found}"
