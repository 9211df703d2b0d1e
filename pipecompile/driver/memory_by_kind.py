"""Bytes of each device at the peak of a predicted step, by kind.

parameters    of all stages of the device, and of all copies of stages, each once
gradients     of those that are trained
optimizer     as many copies of these as the optimizer keeps
buffers       what a module holds beside parameters
activations   the highest point of the device's curve in the simulation
graph         what a CUDA graph of the whole step holds beside these: inputs, targets and loss weights of all micro-batches, and gradients once more
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from pipecompile.graph.colocation import compute_nodes
from pipecompile.graph.module_names import held_tensors
from pipecompile.ir import HOST, Op, Program
from pipecompile.ir.directions import Direction
from pipecompile.ir.plan import Plan
from pipecompile.torch_private.storages import footprint
from pipecompile.tracing.traced_graph import TracedGraph

__all__ = ["memory_by_kind", "with_step_graph"]


def memory_by_kind(
    graph: TracedGraph,
    plan: Plan,
    activations: Sequence[float],
    optimizer_state: int,
    directions: Sequence[Direction] = (),
) -> dict[str, list[float]]:
    """Return kind -> bytes of each device, in the order of the table above, without the last.

    `activations` are bytes per device. `optimizer_state` is the number of tensors that the optimizer keeps per parameter. `directions`
    have further copies of all stages.
    """
    held: list[dict[int, torch.Tensor]] = [{} for _ in plan.devices]
    placements = plan.placement, *(direction.placement for direction in directions)
    for node in compute_nodes(graph):
        tensors = {id(tensor): tensor for tensor in held_tensors(graph, node)}
        for placement in placements:
            held[placement[plan.stage_of[node.name]]].update(tensors)
    parameters = [[t for t in own.values() if isinstance(t, nn.Parameter)] for own in held]
    gradients = [_bytes(t for t in own.values() if t.requires_grad) for own in held]
    buffers = [_bytes(t for t in own.values() if not isinstance(t, nn.Parameter)) for own in held]
    return {
        "parameters": [_bytes(own) for own in parameters],
        "gradients": gradients,
        "optimizer": [optimizer_state * each for each in gradients],
        "buffers": buffers,
        "activations": [*activations, *[0.0] * len(held)][: len(held)],
    }


def with_step_graph(kinds: dict[str, list[float]], program: Program) -> dict[str, list[float]]:
    """Return the kinds with that of the graph of a whole step."""
    sizes = {route.value: route.nbytes for route in program.routes}
    arriving = [
        sum(sizes.get(one.writes[0].value.name, 0.0) for one in row if one.op is Op.RECV and one.peer == HOST)
        for row in program.rows
    ]
    return {**kinds, "graph": [sum(pair) for pair in zip(arriving, kinds["gradients"], strict=True)]}


def _bytes(tensors: Iterable[torch.Tensor]) -> float:
    return float(sum(map(footprint, tensors)))
