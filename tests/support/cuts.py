"""Cuts of a traced graph for tests, and a plain loop that runs the stages one after the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from pipecompile.graph.colocation import compute_nodes, note_ties
from pipecompile.graph.cut_transfer import transfer_cut
from pipecompile.graph.stages import Stage, routes, split
from pipecompile.ir import Route
from pipecompile.tracing.node_facts import Role, facts

__all__ = ["cut", "run_stages", "stages_of"]


def cut(graph: fx.GraphModule, bounds: Sequence[int]) -> dict[str, int]:
    """A stage for every node: cut the order of the graph before the nodes `bounds`, then delay what ties forbid to go first."""
    wanted = {node.name: sum(i >= bound for bound in bounds) for i, node in enumerate(compute_nodes(graph))}
    return transfer_cut(wanted, note_ties(graph), len(bounds) + 1)


def stages_of(graph: fx.GraphModule, stage_of: Mapping[str, int]) -> tuple[tuple[Route, ...], tuple[Stage, ...]]:
    ways = routes(graph, stage_of)
    devices = [torch.device("cpu")] * (1 + max(stage_of.values(), default=0))
    return ways, split(graph, ways, stage_of, devices)


def run_stages(graph: fx.GraphModule, stage_of: Mapping[str, int], size: int, *args: Any, **kwargs: Any) -> Any:
    """What the model returns, computed stage by stage; a value is handed on as it is."""
    _, stages = stages_of(graph, stage_of)
    names = [node.name for node in graph.graph.nodes if node.op == "placeholder"]
    values = dict(zip(names, pytree.tree_leaves((args, kwargs)), strict=True))
    values |= {node.name: size for node in graph.graph.nodes if facts(node).role is Role.BATCH_SIZE}
    for stage in stages:
        given = [values[name] for name in stage.inputs] + [size] * stage.sized
        values |= zip(stage.outputs, stage.module(*given), strict=True)
    node = graph.graph.output_node()
    flat = [values[leaf.name] if isinstance(leaf, fx.Node) else leaf for leaf in node.args[0]]
    return pytree.tree_unflatten(flat, graph.facts.out_spec)
