"""fx: code of graphs with nested inputs, and parts of graphs and nodes that have no public name."""

from __future__ import annotations

from torch import fx
from torch._ops import OpOverload  # 2.11; a call that the dispatcher sees
from torch.fx._pytree import register_pytree_flatten_spec  # 2.11; how fx flattens an input of a class
from torch.fx.graph import _PyTreeCodeGen, _PyTreeInfo

__all__ = [
    "OpOverload",
    "PyTreeCodeGen",
    "PyTreeInfo",
    "codegen_of",
    "register_pytree_flatten_spec",
    "root_of",
    "target_text",
]

PyTreeCodeGen, PyTreeInfo = _PyTreeCodeGen, _PyTreeInfo
"""Code of a graph module whose inputs and outputs are nested containers. 2.11."""


def root_of(graph: fx.Graph) -> fx.Node:
    """Return the node before the first one of a graph: an insertion point in an empty graph. 2.11."""
    return graph._root


def codegen_of(graph: fx.Graph) -> fx.graph.CodeGen:
    """Return what writes the code of a graph: the structure of its inputs and outputs. 2.11."""
    return graph._codegen


def target_text(node: fx.Node) -> str:
    """Return the target of a node as fx prints it. 2.11."""
    return node._pretty_print_target(node.target)
