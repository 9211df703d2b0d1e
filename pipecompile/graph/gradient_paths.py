"""Paths of gradients: the nodes between the tensors that `autograd.grad` differentiates and its call, which one autograd graph must have."""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from pipecompile.tracing.node_facts import facts

__all__ = ["differentiated", "reached", "reaching"]


def differentiated(call: fx.Node, nodes: Sequence[fx.Node]) -> list[fx.Node]:
    """Return those of `nodes`, which end with a call of `autograd.grad`, that are computed from the inputs of the call, and these.

    A layer that is called whole computes from its weights without an edge of the graph: it reads their memory.
    """
    inputs: set[fx.Node] = set()
    fx.node.map_arg(call.kwargs.get("inputs", call.args[1:2]), inputs.add)
    weights = {key for node in inputs if node.op == "get_attr" for key in facts(node).storages}
    layers = {node for node in nodes if not weights.isdisjoint(facts(node).reads)}
    computed = reached(inputs | layers, nodes)
    return [node for node in nodes if node in computed]


def reached(sources: set[fx.Node], nodes: Sequence[fx.Node]) -> set[fx.Node]:
    """Return the nodes that are computed from the sources, and these."""
    found = set(sources)
    for node in nodes:
        if not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found


def reaching(ends: set[fx.Node], nodes: Sequence[fx.Node]) -> set[fx.Node]:
    """Return the nodes that the ends are computed from, and these."""
    found = set(ends)
    for node in reversed(nodes):
        if node in found:
            found.update(node.all_input_nodes)
    return found
