"""Routes from stages that leave values on objects and send nothing: each backward comes after their forward of the micro-batch.

stage 0   h = first(x); h.register_hook(hook)       h ─► 2        hook reads self.scale in 0B0
stage 1   self.scale = largest(x)                   largest ─► 3  without this route, 0B0 could run before 1F0 in another thread
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import networkx as nx
import torch
from torch import fx

from pipecompile.graph.colocation import compute_nodes
from pipecompile.graph.left_for_loss import is_for_loss
from pipecompile.graph.stages import route_of, routes
from pipecompile.ir import HOST, Route
from pipecompile.tracing.node_facts import value_of
from pipecompile.tracing.opaque.opaque_module import runs_python
from pipecompile.tracing.traced_graph import TracedGraph

__all__ = ["ordered_routes"]


def ordered_routes(
    graph: TracedGraph, stage_of: Mapping[str, int], n_stages: int, samples: int | None = None, *, in_one_process: bool
) -> tuple[Route, ...]:
    """Return the routes between stages, and one to the last stage from each stage that leaves values and from which no other route leads
    there. All backwards of a micro-batch begin behind the forward of the last stage, which gets what the model returns.

    On ranks there are no such routes: what a stage leaves is on its own rank. The arguments are those of `routes`.
    """
    found = routes(graph, stage_of, samples)
    last, leaving = n_stages - 1, _leaving(graph, stage_of) if in_one_process else {}
    ends = nx.DiGraph((one.source, last if end == HOST else end) for one in found for end in one.consumers)
    ends.add_nodes_from(range(n_stages))
    behind = {last, *nx.ancestors(ends, last)}
    sizes = {graph.facts.symbol: samples} if samples else {}
    added = (route_of(node, stage, (last,), sizes) for stage, node in leaving.items() if stage not in behind)
    return (*found, *(replace(route, gradient=False) for route in added))


def _leaving(graph: TracedGraph, stage_of: Mapping[str, int]) -> dict[int, fx.Node]:
    """Return, by stage, the last node that leaves values on objects, or whose Python may; one without a result if there is one."""
    found: dict[int, fx.Node] = {}
    for node in compute_nodes(graph):
        if node.name in stage_of and _leaves(graph, node):
            stage = stage_of[node.name]
            if stage not in found or not _has_result(node) or _has_result(found[stage]):
                found[stage] = node
    return found


def _leaves(module: TracedGraph, node: fx.Node) -> bool:
    if node.op == "call_module":
        return runs_python(module.get_submodule(str(node.target)))
    return hasattr(node.target, "place") and not is_for_loss(node)


def _has_result(node: fx.Node) -> bool:
    return isinstance(value_of(node), torch.Tensor)
