"""Generator objects that nodes of a graph draw from: torch's default generators are none of them.

rand(4, generator=G)        G, an attribute of the graph
a piece kept whole          what its modules hold, and what their functions name or close over; whether it draws may differ from call to call
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import fx

from pipecompile.tracing.node_facts import facts
from pipecompile.tracing.opaque.opaque_module import OpaqueModule
from pipecompile.tracing.reachable_code import reachable
from pipecompile.tracing.state.random_states import generators_among
from pipecompile.tracing.state.snapshot import held_values, places_of

__all__ = ["drawn_generators"]


def drawn_generators(module: fx.GraphModule, nodes: Iterable[fx.Node]) -> list[Any]:
    """Return the generator objects that these nodes of a graph may draw from, those of the inputs aside."""
    nodes = list(nodes)
    drawing = [node for node in nodes if facts(node).draws]
    held = [
        value
        for piece in _pieces(module, nodes)
        for owner in piece.owner
        for value in (*held_values(places_of(owner)), *reachable(owner).objects)
    ]
    return generators_among([*_named(module, drawing), *held])


def _pieces(module: fx.GraphModule, nodes: Iterable[fx.Node]) -> list[OpaqueModule]:
    """Return the pieces kept whole among these nodes: what user code draws in them, no node shows."""
    called = [module.get_submodule(str(node.target)) for node in nodes if node.op == "call_module"]
    return [one for one in called if isinstance(one, OpaqueModule) and one.is_users and one.owner]


def _named(module: fx.GraphModule, nodes: Iterable[fx.Node]) -> Iterator[Any]:
    """Yield the attributes of the graph that are arguments of these nodes."""
    for source in {source: None for node in nodes for source in node.all_input_nodes if source.op == "get_attr"}:
        *parents, name = str(source.target).split(".")
        yield getattr(module.get_submodule(".".join(parents)), name)
