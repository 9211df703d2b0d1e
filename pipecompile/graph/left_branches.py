"""Side branches: nodes that lead to no output, and leave a tensor with a gradient on the model, which the loss may read.

    h ─► square ─► mean ─► keep      self.aux = h.square().mean(); loss_fn reads model.aux
    └──► relu ─► ... ─► output

A stage of nothing but a side branch sends nothing to other stages, so no gradient comes back to it, and its backward would not wait for
the loss. A branch stays with the node that it begins at: the backward of that node's stage waits for the loss.
"""

from __future__ import annotations

from collections.abc import Sequence

import networkx as nx
import torch
from torch import fx, nn

from pipecompile.tracing.node_facts import facts, value_of
from pipecompile.tracing.opaque.opaque_module import runs_python
from pipecompile.tracing.traced_graph import TracedGraph

__all__ = ["anchored_branches"]


def anchored_branches(graph: fx.GraphModule, nodes: Sequence[fx.Node]) -> list[list[fx.Node]]:
    """Return the nodes of each side branch, in graph order, behind the last node outside on which they depend and that has a gradient;
    of a branch that begins at inputs, behind the node that makes the output. `nodes` are those that have a stage.
    """
    order, live = {node: index for index, node in enumerate(nodes)}, _with_gradient(graph)
    main = _reaching(live.intersection(graph.graph.output_node().all_input_nodes), nodes, live)
    ends = {node for node in nodes if _may_leave_gradients(graph, node, live)}
    branch = _reaching(ends - main, nodes, live) - main
    links: nx.Graph[fx.Node] = nx.Graph()
    links.add_nodes_from(branch & order.keys())
    links.add_edges_from((source, node) for node in links for source in node.all_input_nodes if source in links)
    last = max(main & order.keys(), key=order.__getitem__, default=None)
    found = []
    for part in nx.connected_components(links):
        sources = {source for node in part for source in node.all_input_nodes} & main & order.keys()
        anchor = max(sources, key=order.__getitem__, default=last)
        found.append([*([] if anchor is None else [anchor]), *sorted(part, key=order.__getitem__)])
    return sorted(found, key=lambda part: order[part[-1]])


def _reaching(ends: set[fx.Node], nodes: Sequence[fx.Node], live: set[fx.Node]) -> set[fx.Node]:
    """Return the ends, and the nodes that they are computed from and that are `live`."""
    reaching = set(ends)
    for node in reversed(nodes):
        if node in reaching:
            reaching |= live.intersection(node.all_input_nodes)
    return reaching


def _with_gradient(graph: fx.GraphModule) -> set[fx.Node]:
    """Return the nodes whose values may have a gradient, also if the graph was recorded without gradients."""
    outside = graph.facts.outside.grad if isinstance(graph, TracedGraph) else True
    live = set[fx.Node]()
    for node in graph.graph.nodes:
        value, ambient = value_of(node), facts(node).ambient
        is_real = not isinstance(value, torch.Tensor) or value.is_floating_point() or value.is_complex()
        is_off = outside and ambient is not None and not ambient.grad
        is_trained = isinstance(value, torch.Tensor) and value.requires_grad
        is_source = node.op == "call_module" or (node.op in ("placeholder", "get_attr") and is_trained)
        if is_real and not is_off and not _detaches(node) and (is_source or not live.isdisjoint(node.all_input_nodes)):
            live.add(node)
    return live


def _detaches(node: fx.Node) -> bool:
    return facts(node).is_size or (node.op == "call_method" and node.target in ("detach", "detach_", "item", "tolist"))


def _may_leave_gradients(graph: fx.GraphModule, node: fx.Node, live: set[fx.Node]) -> bool:
    """Return whether the node writes to an attribute or a container, or runs user code, which may, with something that has a
    gradient: an input that is `live`, or weights of its own.
    """
    if node.op != "call_module":
        return hasattr(node.target, "place") and not live.isdisjoint(node.all_input_nodes)
    called: nn.Module = graph.get_submodule(str(node.target))
    is_trained = any(weight.requires_grad for weight in called.parameters())
    return runs_python(called) and (is_trained or not live.isdisjoint(node.all_input_nodes))
