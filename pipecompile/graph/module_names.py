"""Modules in a traced graph: names of modules and nodes in options, resolved to nodes; the parameters and buffers of a node."""

from __future__ import annotations

from difflib import get_close_matches

from torch import Tensor, fx

from pipecompile.errors import InputError
from pipecompile.graph.colocation import compute_nodes
from pipecompile.tracing.emit.call_description import model_path
from pipecompile.tracing.node_facts import facts

__all__ = ["held_tensors", "module_of", "nodes_of_module"]


def nodes_of_module(graph: fx.GraphModule, name: str, option: str) -> list[str]:
    """Return the compute nodes of a module and of all modules inside it, in graph order; for the name of a node, that node.

    Raise InputError for a name without nodes. `option` is the option that has the name.
    """
    nodes = compute_nodes(graph)
    found = [node.name for node in nodes if module_of(node) == name or module_of(node).startswith(f"{name}.")]
    found = found or [node.name for node in nodes if node.name == name]
    if not found:
        known = {".".join(path[:depth]) for node in nodes if (path := module_of(node).split(".")) for depth in range(1, 1 + len(path))}  # fmt: skip
        near = get_close_matches(name, sorted(known - {""})) or sorted(known - {""})[:5]
        raise InputError(
            f"{option}: no module or node of the graph is called {name!r}", why="no call of such a module was recorded",
            hint=f"a module that runs, such as {', '.join(map(repr, near))}" if near else "",
        )  # fmt: skip
    return found


def module_of(node: fx.Node) -> str:
    """Return the module that a node calls, or whose forward made the call."""
    return model_path(str(node.target)) if node.op == "call_module" else facts(node).module


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
