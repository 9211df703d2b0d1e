"""Graph pass: nodes that must share a stage because they share memory, and nodes that must not come after a write.

    y = bn(x)         one group {bn, relu_}: relu_ writes y's memory, and a write never crosses a cut
    z = conv(y)  ──►  conv reads before the write: stage(conv) <= stage(relu_)
    relu_(y)

Storages and writes come from the recording (NodeFacts), so this module has no list of in-place operators.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise

import networkx as nx
import torch
from torch import fx, nn

from pipecompile.tracing.emit.closures import rebuilt
from pipecompile.tracing.graph_facts import Ties
from pipecompile.tracing.graph_text import ModuleStub
from pipecompile.tracing.node_facts import Role, facts, value_of
from pipecompile.tracing.opaque.opaque_module import OpaqueModule
from pipecompile.tracing.qualified_names import qualified
from pipecompile.tracing.traced_graph import TracedGraph

__all__ = ["compute_ties", "compute_nodes", "note_ties", "ties_of"]


def note_ties(graph: TracedGraph) -> TracedGraph:
    """Note the ties of the graph in its facts, and return the graph."""
    graph.facts = replace(graph.facts, ties=compute_ties(graph))
    return graph


def ties_of(graph: TracedGraph) -> Ties:
    """Return the ties noted in a graph; compute them for a graph that is not prepared."""
    return graph.facts.ties or compute_ties(graph)


def compute_nodes(graph: fx.GraphModule) -> list[fx.Node]:
    """Return the nodes that have a stage, in graph order: no inputs, attributes, sizes, mode switches or output."""
    called = ("call_module", "call_function", "call_method")
    return [n for n in graph.graph.nodes if n.op in called and facts(n).role is Role.VALUE]


def compute_ties(graph: fx.GraphModule) -> Ties:
    """Return the ties of tuples and their items, of modules with state called twice, of `autograd.grad`, random states and memory written."""
    nodes = compute_nodes(graph)
    ties: nx.Graph[str] = nx.Graph()
    _tie_items(nodes, ties)
    _tie_stateful_modules(graph, nodes, ties)
    _tie_gradients(nodes, ties)
    precedence = [*_tie_writes(graph, nodes, ties), *_tie_draws(nodes, ties)]
    order = {node.name: index for index, node in enumerate(nodes)}
    groups = [tuple(sorted(group, key=order.__getitem__)) for group in nx.connected_components(ties)]
    return Ties(tuple(sorted(groups, key=lambda group: order[group[0]])), tuple(dict.fromkeys(precedence)))


def _tie(ties: nx.Graph[str], nodes: Iterable[fx.Node]) -> None:
    nx.add_path(ties, [node.name for node in nodes])


def _tie_items(nodes: list[fx.Node], ties: nx.Graph[str]) -> None:
    """Tie each node to the sources that are no tensors, since only tensors cross a cut.

    An item stays with its tuple, list, dict or object, and the user of a size that the data decide with the node that reads the size.
    """
    made = set(nodes)
    for node in nodes:
        for source in node.all_input_nodes:
            if source in made and not isinstance(value_of(source), torch.Tensor):
                _tie(ties, (source, node))


def _tie_stateful_modules(graph: fx.GraphModule, nodes: list[fx.Node], ties: nx.Graph[str]) -> None:
    uses: defaultdict[nn.Module, list[fx.Node]] = defaultdict(list)
    for node in nodes:
        if node.op == "call_module":
            uses[graph.get_submodule(str(node.target))].append(node)
    for module, users in uses.items():
        if len(users) > 1 and (_is_opaque(module) or next(module.buffers(), None) is not None):
            _tie(ties, users)


def _is_opaque(module: nn.Module) -> bool:
    """Return whether the module is an opaque piece of the model, or the stub of one in a parsed graph."""
    return isinstance(module, OpaqueModule) or (
        isinstance(module, ModuleStub) and module.kind == qualified(OpaqueModule)
    )


def _tie_gradients(nodes: list[fx.Node], ties: nx.Graph[str]) -> None:
    """Tie all nodes between the inputs and outputs of `autograd.grad(outputs, inputs)`: autograd needs their graph in one piece.

    A function that closes over tensors may call `autograd.grad` on them.
    """
    for i, node in enumerate(nodes):
        if node.target is torch.autograd.grad:
            inputs: set[fx.Node] = set()
            fx.node.map_arg(node.kwargs.get("inputs", node.args[1:2]), inputs.add)
            reached = _reached(inputs, nodes[: i + 1])
            _tie(ties, [other for other in nodes[: i + 1] if other in reached])
        elif node.target is rebuilt:
            held = set(node.all_input_nodes)
            between = _reached(held, nodes[:i]) & _reaching(held, nodes[:i])
            _tie(ties, [*(other for other in nodes[:i] if other in between), node] if between - held else [])


def _reached(sources: set[fx.Node], nodes: list[fx.Node]) -> set[fx.Node]:
    """Return the nodes that are computed from the sources, and these."""
    reached = set(sources)
    for node in nodes:
        if not reached.isdisjoint(node.all_input_nodes):
            reached.add(node)
    return reached


def _reaching(ends: set[fx.Node], nodes: list[fx.Node]) -> set[fx.Node]:
    """Return the nodes that the ends are computed from, and these."""
    reaching = set(ends)
    for node in reversed(nodes):
        if node in reaching:
            reaching.update(node.all_input_nodes)
    return reaching


def _tie_draws(nodes: list[fx.Node], ties: nx.Graph[str]) -> list[tuple[str, str]]:
    """Return the pairs that keep random draws in the order of the model; tie all draws if a node sets the generator's state."""
    drawing = [node for node in nodes if facts(node).draws]
    if any(facts(node).seeds for node in drawing):
        _tie(ties, drawing)
    return [(a.name, b.name) for a, b in pairwise(drawing)]


def _tie_writes(graph: fx.GraphModule, nodes: list[fx.Node], ties: nx.Graph[str]) -> list[tuple[str, str]]:
    """Tie the nodes that make or write the same memory, and return pairs (reader, writer) for reads before the last write.

    Parameters, buffers and constants outlive the micro-batch, and the next micro-batch may write them again while a later stage
    still reads: all their readers are tied to the writer. So are the readers of an input that a node writes.
    """
    last_write = {storage: i for i, node in enumerate(nodes) for storage in facts(node).mutates}
    lasting = {storage for node in graph.graph.nodes if node.op == "get_attr" for storage in facts(node).storages}
    lasting |= {storage for node in nodes for storage in facts(node).reads}
    tied: defaultdict[int, list[fx.Node]] = defaultdict(list)
    precedence = []
    for i, node in enumerate(nodes):
        read = {(storage, source.op) for source in node.all_input_nodes for storage in facts(source).storages}
        read |= {(storage, "get_attr") for storage in facts(node).reads}
        touched = {*facts(node).storages, *facts(node).mutates, *(storage for storage, _ in read)}
        for storage in sorted(touched & last_write.keys()):
            owns = storage in facts(node).mutates or (storage in facts(node).storages and i <= last_write[storage])
            if owns or storage in lasting or (storage, "placeholder") in read:
                tied[storage].append(node)
            elif i < last_write[storage]:
                precedence.append((node.name, nodes[last_write[storage]].name))
    for group in tied.values():
        _tie(ties, group)
    return precedence
