"""Causal masks that a model makes from positions alone: their value is computed, and compared with a triangle.

arange(4)[:, None] >= arange(4)      1 0 0 0
                                     1 1 0 0      causal: the attention is that of is_causal=True
                                     1 1 1 0
                                     1 1 1 1
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from pipecompile.tracing.node_facts import Role, facts
from pipecompile.tracing.traced_graph import TracedGraph

__all__ = ["constants_of", "is_causal_mask"]

_SAMPLES = 2
"""Samples for which a mask is computed."""


def constants_of(graph: TracedGraph) -> set[fx.Node]:
    """Return the values that depend on neither inputs nor parameters, but on sizes. Linear."""
    found: set[fx.Node] = set()
    for node in graph.graph.nodes:
        is_plain = node.op in ("call_function", "call_method") and not (facts(node).draws or facts(node).mutates)
        if is_plain and all(facts(source).is_size or source in found for source in node.all_input_nodes):
            found.add(node)
    return found


def is_causal_mask(graph: TracedGraph, mask: fx.Node) -> bool:
    """Return whether a mask is made from sizes alone, and lets each position attend to itself and those before."""
    if mask not in constants_of(graph):
        return False
    wanted, values = _before(mask), dict[fx.Node, Any]()
    try:
        with torch.no_grad():
            for node in graph.graph.nodes:
                if node in wanted:
                    values[node] = _value(node, values)
    except Exception:  # whatever the calls raise: the mask is not known
        return False
    return _is_triangle(values[mask])


def _before(node: fx.Node) -> set[fx.Node]:
    """Return a node and all that it is computed from."""
    found, pending = set[fx.Node](), [node]
    while pending:
        last = pending.pop()
        if last not in found:
            found.add(last)
            pending += [] if facts(last).role is Role.BATCH_SIZE else last.all_input_nodes
    return found


def _value(node: fx.Node, values: dict[fx.Node, Any]) -> Any:
    if facts(node).role is Role.BATCH_SIZE:
        return _SAMPLES
    args: Any = fx.map_arg(node.args, values.__getitem__)
    kwargs: Any = fx.map_arg(node.kwargs, values.__getitem__)
    if node.op == "call_method":
        first, *others = args
        return getattr(first, str(node.target))(*others, **kwargs)
    assert callable(node.target)
    return node.target(*args, **kwargs)


def _is_triangle(mask: Any) -> bool:
    if not isinstance(mask, torch.Tensor) or mask.dim() < 2 or mask.shape[-1] != mask.shape[-2]:
        return False
    allowed = mask
    if mask.is_floating_point():
        allowed = mask == 0
        if not bool((allowed | (mask <= torch.finfo(mask.dtype).min)).all()):
            return False
    triangle = torch.ones(mask.shape[-2:], dtype=torch.bool, device=mask.device).tril()
    return allowed.dtype is torch.bool and bool((allowed == triangle).all())
