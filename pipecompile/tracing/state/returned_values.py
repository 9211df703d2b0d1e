"""Results of a call, as a node behind its other nodes: two calls are recorded alike only if they return alike.

self.n += 1; return y, self.n               the second call returns another number
self.n += 1; return (a, b)[self.n % 2]      the second call returns the result of another node
last, self.last = self.last, y; return last the second call returns what the first has made
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from pipecompile.batching.containers import with_shells
from pipecompile.torch_private import pytree
from pipecompile.tracing.emit.value_nodes import PLAIN, ValueNodes
from pipecompile.tracing.node_facts import NodeFacts, set_facts

__all__ = ["note_returned"]

_IN_NODES = (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool, *PLAIN)


def returned(*values: Any) -> None:
    """Stand for the values that a call returns, in a node that no graph keeps."""
    raise AssertionError(f"{values} are compared while a model is recorded, and returned by the output node")


def note_returned(values: ValueNodes, output: Any) -> fx.Node:
    """Append a node whose arguments are what a call returns: keys, nodes of tensors, plain values, and classes of other objects."""
    leaves, structure = pytree.tree_flatten(with_shells(output))
    node = values.graph.call_function(returned, (*_keys(structure), *(_argument(values, leaf) for leaf in leaves)))
    set_facts(node, NodeFacts(), None)
    return node


def _argument(values: ValueNodes, leaf: Any) -> Any:
    if isinstance(leaf, str):
        return repr(leaf)
    return values.argument(leaf) if isinstance(leaf, _IN_NODES) else type(leaf).__qualname__


def _keys(structure: pytree.TreeSpec) -> Iterator[str]:
    if structure.type is dict:
        yield str(structure.context)
    for child in pytree.children_of_spec(structure):
        yield from _keys(child)
