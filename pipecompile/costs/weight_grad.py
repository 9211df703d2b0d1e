"""How much of a stage's backward may wait: what W takes, from what its nodes cost.

input ─► a ─► b ─► out        b and a lead to an input that wants a gradient: of them W has what is for weights alone
          c ─► d ─► out       c and d lead to none: W has all of it, as in a first stage
          e ─► b              e does neither, but I passes through b and takes it along
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from pipecompile.costs import NodeCost
from pipecompile.graph.held_tensors import held_tensors
from pipecompile.tracing.node_facts import value_of

__all__ = ["Late", "late", "wanting"]


def wanting(graph: fx.GraphModule) -> set[fx.Node]:
    """Nodes whose value wants a gradient: a trained parameter or such an input went into it."""
    found: set[fx.Node] = set()
    for node in graph.graph.nodes:
        value = value_of(node)
        if node.op == "placeholder":
            wants = isinstance(value, torch.Tensor) and value.requires_grad
        else:
            held = () if node.op in ("get_attr", "output") else held_tensors(graph, node)
            wants = any(t.requires_grad for t in held) or any(source in found for source in node.all_input_nodes)
        if wants:
            found.add(node)
    return found


@dataclass(frozen=True, slots=True)
class Late:
    """What W of one stage takes: seconds, how many of them are for having divided the backward, and what it needs kept."""

    seconds: float
    dividing: float
    saved_bytes: float


def late(nodes: Sequence[fx.Node], costs: Mapping[str, NodeCost], wants: set[fx.Node]) -> Late:
    """Of one stage, given its nodes in order. What is inward, and what it reads, is not left to W as a whole; where it is
    divided, W needs what went into the node, and the gradient of what came out. What was received stays with the graph.
    """
    mine, inward = set(nodes), set[fx.Node]()
    for node in nodes:
        if any(source in inward or (source not in mine and source in wants) for source in node.all_input_nodes):
            inward.add(node)
    taken = set[fx.Node]()
    for node in reversed(nodes):
        if any(user in inward or user in taken for user in node.users):
            taken.add(node)
    divided = [node for node in nodes if node in inward and costs[node.name].weight_grad]
    kept = {source for node in divided for source in node.all_input_nodes if source in mine}
    cost = [costs[node.name] for node in divided]
    whole = [costs[node.name] for node in nodes if node not in inward and node not in taken]
    return Late(
        sum(each.backward for each in whole) + sum(each.weight_grad for each in cost),
        sum(each.dividing for each in cost),
        sum(each.saved_bytes for each in whole)
        + sum(each.output_bytes for each in cost)
        + sum(costs[node.name].output_bytes for node in kept),
    )
