"""The parameters and buffers that a node of a traced graph uses."""

from __future__ import annotations

from torch import Tensor, fx

__all__ = ["held_tensors"]


def held_tensors(graph: fx.GraphModule, node: fx.Node) -> list[Tensor]:
    """Return the parameters and buffers of the node's module, then the tensors that the node reads by get_attr."""
    tensors: list[Tensor] = []
    if node.op == "call_module":
        module = graph.get_submodule(str(node.target))
        tensors += [*module.parameters(), *module.buffers()]
    attributes = [_attribute(graph, source) for source in node.all_input_nodes if source.op == "get_attr"]
    return tensors + [value for value in attributes if isinstance(value, Tensor)]


def _attribute(graph: fx.GraphModule, node: fx.Node) -> object:
    """Return the value of a get_attr node, whose target is a dotted path."""
    value: object = graph
    for name in str(node.target).split("."):
        value = getattr(value, name)
    return value
