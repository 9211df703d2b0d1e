"""The partition problem of a traced graph: times, bytes and edges as plain data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import fx

from pipecompile.costs.node_cost import NodeCost
from pipecompile.graph.colocation import compute_nodes, ties_of
from pipecompile.graph.held_tensors import held_tensors
from pipecompile.partitioners import Node, Problem, Shared, Tensor
from pipecompile.torch_private.tensor_bytes import footprint
from pipecompile.tracing.node_facts import facts, value_of
from pipecompile.tracing.traced_graph import TracedGraph

__all__ = ["build_problem"]


def build_problem(
    graph: TracedGraph,
    costs: Mapping[str, NodeCost],
    *,
    seconds_per_byte: float = 0.0,
    latency: float = 0.0,
    memory_limit: float | Sequence[float] | None = None,
    in_flight: Sequence[float] | None = None,
    groups: Iterable[Sequence[str]] = (),
    optimizer_state: int = 0,
    restored: int = 1,
) -> Problem:
    """One problem node per compute node, time for forward and backward of one micro-batch.

    `bytes` are parameters with their gradients and `optimizer_state` copies, and buffers; what several nodes use is shared:
    each device that has any of them holds it once. `activation` is what autograd saves, of so many micro-batches as are
    `restored` at once where all stages recompute. A tensor's time counts both directions, the activation there and its
    gradient back; its bytes are what a stage that receives it keeps.
    """
    nodes, ties = compute_nodes(graph), ties_of(graph)
    names = {node.name for node in nodes}
    held, shared = _held_bytes(graph, nodes, optimizer_state)
    edges = [(source.name, node.name) for node in nodes for source in sources(node) if source.name in names]
    tensors = [
        Tensor(
            node.name,
            tuple(dict.fromkeys(users)),
            2 * latency + 2 * costs[node.name].output_bytes * seconds_per_byte,
            float(costs[node.name].output_bytes),
        )
        for node in nodes
        if (users := [user.name for user in node.users if user.name in names])
        and isinstance(value_of(node), torch.Tensor)
    ]
    return Problem(
        nodes=tuple(
            Node(
                n.name,
                costs[n.name].forward + costs[n.name].backward,
                held[n.name],
                costs[n.name].saved_bytes * restored,
                costs[n.name].forward,
            )
            for n in nodes
        ),
        precedence=tuple(dict.fromkeys([*edges, *ties.precedence])),
        tensors=tuple(tensors),
        groups=(*ties.groups, *map(tuple, groups)),
        memory_limit=memory_limit
        if memory_limit is None or isinstance(memory_limit, (int, float))
        else tuple(memory_limit),
        in_flight=None if in_flight is None else tuple(in_flight),
        multicast=False,
        shared=shared,
        name=type(graph).__name__,
    )


def sources(node: fx.Node) -> list[fx.Node]:
    """The nodes whose values this one reads; a size's own inputs do not count, it is computed anew in every stage."""
    return [source for source in node.all_input_nodes if not facts(source).is_size]


def _held_bytes(
    graph: TracedGraph, nodes: Sequence[fx.Node], optimizer_state: int
) -> tuple[dict[str, float], tuple[Shared, ...]]:
    """What each node alone holds, and what several share."""
    users: dict[int, dict[str, torch.Tensor]] = {}
    for node in nodes:
        for tensor in held_tensors(graph, node):
            users.setdefault(id(tensor), {})[node.name] = tensor
    held, shared = {node.name: 0.0 for node in nodes}, dict[tuple[str, ...], float]()
    for uses in users.values():
        names, tensor = tuple(uses), next(iter(uses.values()))
        size = float(footprint(tensor) * (1 + (1 + optimizer_state) * tensor.requires_grad))
        if len(names) == 1:
            held[names[0]] += size
        else:
            shared[names] = shared.get(names, 0.0) + size
    return held, tuple(Shared(names, size) for names, size in shared.items())
