"""Names of modules and nodes in options, resolved to nodes of a graph."""

from __future__ import annotations

from difflib import get_close_matches

from torch import fx

from pipecompile.errors import InputError
from pipecompile.graph.colocation import compute_nodes
from pipecompile.tracing.emit.node_target import model_path
from pipecompile.tracing.node_facts import facts

__all__ = ["module_of", "nodes_of_module"]


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
