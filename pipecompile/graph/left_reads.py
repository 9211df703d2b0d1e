"""Ties of Python that reads what other Python of a forward leaves on an object: in two stages, it would find that of another micro-batch.

    scale = largest(x)     kept whole: sets self.scale       one stage      1F1 would set self.scale before 2F0 has read it
    out = self.gate(h)     kept whole: reads self.scale

Python runs in pieces kept whole and in hooks of layers. No edge of the graph leads from what sets an attribute to what reads it.
Hooks of a backward are no case: they find what the forward of their micro-batch has left (`runtime/cells/backward_reads.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

import networkx as nx
from torch import fx

from pipecompile.graph.python_use import PythonUse, python_use
from pipecompile.tracing.node_facts import facts

__all__ = ["tie_left_reads"]


def tie_left_reads(graph: fx.GraphModule, nodes: Sequence[fx.Node], ties: nx.Graph[str]) -> None:
    """Tie each node whose Python reads an attribute or a list to the nodes that set or change it. A node before another one may read what
    the forward of the micro-batch before has left.
    """
    called = {node: graph.get_submodule(str(node.target)) for node in nodes if node.op == "call_module"}
    uses = {node: use for node, module in called.items() if (use := python_use(module)) is not None}
    effects = [(node, node.target.place) for node in nodes if hasattr(node.target, "place")]
    for reader, use in uses.items() if len(uses) + len(effects) > 1 else ():
        for node, place in effects:
            if place.key in use.read and id(place.container) in use.dicts:
                _tie(ties, node, reader, place.key)
        for writer, other in uses.items():
            if writer is not reader and (name := _read_of(use, other)):
                _tie(ties, writer, reader, name)


def _read_of(reader: PythonUse, writer: PythonUse) -> str:
    """Return a name that a reader reads of what a writer leaves; "" if there is none."""
    if reader.module is writer.module:
        return ""
    bound, changed = (sorted(reader.read & names) for names in (writer.bound, writer.changed))
    found = [name for name in bound if reader.shares_object(writer, name)]
    found += [name for name in changed if reader.shares_list(writer, name)]
    return next(iter(found), "")


def _tie(ties: nx.Graph[str], writer: fx.Node, reader: fx.Node, name: str) -> None:
    where = f" ({facts(reader).source})" if facts(reader).source else ""
    ties.add_edge(
        writer.name, reader.name, why=f"{reader.name}{where} reads {name!r}, which {writer.name} leaves on an object"
    )
