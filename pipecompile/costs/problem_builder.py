"""The partition problem of a traced graph: times, bytes and edges as plain data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import fx, nn

from pipecompile.costs.node_cost import NodeCost
from pipecompile.graph.colocation import compute_nodes, ties_of, ties_with_copies
from pipecompile.graph.module_names import held_tensors
from pipecompile.partitioners import Node, Problem, Shared, Tensor
from pipecompile.torch_private.storages import footprint
from pipecompile.tracing.node_facts import facts, value_of
from pipecompile.tracing.traced_graph import TracedGraph

__all__ = ["build_problem", "with_copied_writes"]


def build_problem(
    graph: TracedGraph,
    costs: Mapping[str, NodeCost],
    *,
    seconds_per_byte: float = 0.0,
    latency: float = 0.0,
    memory_limit: float | Sequence[float] | None = None,
    in_flight: Sequence[float] | None = None,
    optimizer_state: int = 0,
    restored: int = 1,
    shards: int = 1,
) -> Problem:
    """Return a problem with one node per compute node; times are seconds of forward and backward of one micro-batch.

    The bytes of a node are its parameters with their gradients and `optimizer_state` copies, of which each of `shards` ranks
    has a part, and its buffers. Tensors
    that several nodes use are shared: each device with any of these nodes holds them once. The activation of a node is
    the bytes that autograd saves, times the number of micro-batches `restored` at once where all stages recompute. A
    tensor's time is that of sending the activation and returning its gradient, each `latency` seconds and
    `seconds_per_byte`; its bytes are kept by each receiving stage. `memory_limit` is bytes per device; `in_flight` is
    micro-batches per stage.
    """
    nodes, ties = compute_nodes(graph), ties_of(graph)
    names = {node.name for node in nodes}
    held, shared = _held_bytes(graph, nodes, optimizer_state, shards)
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
        groups=ties.groups,
        memory_limit=memory_limit
        if memory_limit is None or isinstance(memory_limit, (int, float))
        else tuple(memory_limit),
        in_flight=None if in_flight is None else tuple(in_flight),
        multicast=False,
        shared=shared,
        name=type(graph).__name__,
    )


def with_copied_writes(problem: Problem, graph: TracedGraph) -> Problem:
    """Return a problem of `graph` in which a cut may separate a value and the operation that writes into it; the same problem if
    there is none. The value then costs a copy: the time of the writing forward at either end, and its bytes once more.
    """
    tight = ties_of(graph)
    loose, copied = ties_with_copies(graph)
    if not copied:
        return problem
    forward = {node.name: node.forward for node in problem.nodes}
    nbytes = {tensor.source: tensor.bytes for tensor in problem.tensors}
    tensors = tuple(Tensor(value, (writer,), forward[writer], nbytes.get(value, 0.0)) for value, writer in copied)
    own = set(tight.precedence) - set(loose.precedence)
    return replace(
        problem,
        precedence=tuple(dict.fromkeys([*(pair for pair in problem.precedence if pair not in own), *loose.precedence])),
        tensors=(*problem.tensors, *tensors),
        groups=loose.groups,
    )


def sources(node: fx.Node) -> list[fx.Node]:
    """Return the nodes whose values this node reads, without sizes, which every stage computes again."""
    return [source for source in node.all_input_nodes if not facts(source).is_size]


def _held_bytes(
    graph: TracedGraph, nodes: Sequence[fx.Node], optimizer_state: int, shards: int
) -> tuple[dict[str, float], tuple[Shared, ...]]:
    """Return the bytes that each node alone holds, and the bytes that several nodes share."""
    users: dict[int, dict[str, torch.Tensor]] = {}
    for node in nodes:
        for tensor in held_tensors(graph, node):
            users.setdefault(id(tensor), {})[node.name] = tensor
    held, shared = {node.name: 0.0 for node in nodes}, dict[tuple[str, ...], float]()
    for uses in users.values():
        names, tensor = tuple(uses), next(iter(uses.values()))
        size = float(footprint(tensor) * (1 + (1 + optimizer_state) * tensor.requires_grad))
        size /= shards if isinstance(tensor, nn.Parameter) else 1
        if len(names) == 1:
            held[names[0]] += size
        else:
            shared[names] = shared.get(names, 0.0) + size
    return held, tuple(Shared(names, size) for names, size in shared.items())
