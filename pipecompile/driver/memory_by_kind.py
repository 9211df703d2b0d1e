"""Bytes of each device at the peak of a predicted step, by kind.

parameters    of all stages of the device, each once
gradients     of those that are trained
optimizer     as many copies of these as the optimizer keeps
buffers       what a module holds beside parameters
activations   the highest point of the device's curve in the simulation
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from pipecompile.graph.colocation import compute_nodes
from pipecompile.graph.module_names import held_tensors
from pipecompile.ir.plan import Plan
from pipecompile.torch_private.storages import footprint
from pipecompile.tracing.traced_graph import TracedGraph

__all__ = ["memory_by_kind"]


def memory_by_kind(
    graph: TracedGraph, plan: Plan, activations: Sequence[float], optimizer_state: int
) -> dict[str, list[float]]:
    """Return kind -> bytes of each device, in the order of the table above.

    `activations` are bytes per device. `optimizer_state` is the number of tensors that the optimizer keeps per parameter.
    """
    held: list[dict[int, torch.Tensor]] = [{} for _ in plan.devices]
    for node in compute_nodes(graph):
        own = held[plan.placement[plan.stage_of[node.name]]]
        own.update({id(tensor): tensor for tensor in held_tensors(graph, node)})
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


def _bytes(tensors: Iterable[torch.Tensor]) -> float:
    return float(sum(map(footprint, tensors)))
