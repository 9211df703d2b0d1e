"""Which cost model to use: the one asked for, or the best that the tensors at hand allow."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.fx import GraphModule

from pipecompile.costs.analytic import analytic_costs
from pipecompile.costs.devices import DeviceSpec
from pipecompile.costs.node_cost import CostProvider, NodeCost
from pipecompile.costs.node_run import tensors_in
from pipecompile.costs.profile import REPEATS, Repeats, profiled_costs
from pipecompile.errors import InputError
from pipecompile.torch_private.modes import FakeTensor
from pipecompile.tracing.state.preserved_run import state_tensors

__all__ = ["chosen_cost", "node_costs"]

NAMES = ("auto", "analytic", "profile")

ASSUMED = "a100"
"""The device for a model on `meta` when none is named. A balance depends only on ratios: compute to bandwidth."""


def node_costs(
    graph: GraphModule,
    inputs: Sequence[object],
    *,
    cost: str | CostProvider = "auto",
    device: DeviceSpec | torch.device | str | None = None,
    repeats: Repeats = REPEATS,
) -> dict[str, NodeCost]:
    """The cost of every compute node of `graph` for one micro-batch `inputs`, by node name.

    **cost:** "profile" measures, "analytic" computes, "auto" measures when all tensors are real and on a `device` of
    the kind asked for, and computes otherwise. A provider of your own is called as it is.
    **device:** what "analytic" computes for: a name ("h100"), a torch.device, or a DeviceSpec. None: where it is.
    **repeats:** how often "profile" measures.

    Raises InputError for an unknown name or device, and to measure what has no memory; CostError when a node fails.
    """
    if callable(cost):
        return cost(graph, inputs)
    if chosen_cost(graph, inputs, cost=cost, device=device) == "profile":
        return profiled_costs(graph, inputs, repeats=repeats)
    tensors = [*state_tensors(graph), *tensors_in(tuple(inputs))]
    return analytic_costs(graph, inputs, device=_home(tensors) if device is None else device)


def chosen_cost(
    graph: GraphModule, inputs: Sequence[object], *, cost: str, device: DeviceSpec | torch.device | str | None = None
) -> str:
    """What `node_costs` will do for these arguments: "profile" or "analytic". Raises InputError as `node_costs` does."""
    if cost not in NAMES:
        hint = f"one of {', '.join(NAMES)}, or a function of (graph, inputs)"
        raise InputError(f"no cost model is called {cost!r}", hint=hint)
    tensors = [*state_tensors(graph), *tensors_in(tuple(inputs))]
    real = not any(tensor.is_meta or isinstance(tensor, (FakeTensor, DTensor)) for tensor in tensors)
    if cost == "profile" and not real:
        raise InputError(
            "only real tensors can be measured",
            why="parameters or inputs are meta, fake, or in parts on several ranks",
            hint='cost="analytic"',
        )
    measured = cost == "profile" or (cost == "auto" and real and _is_here(device, tensors))
    return "profile" if measured else "analytic"


def _is_here(device: DeviceSpec | torch.device | str | None, tensors: Sequence[Tensor]) -> bool:
    """Whether measuring where the tensors are answers the question: no device, or one of their kind, was asked for."""
    if device is None:
        return True
    kind = device.name if isinstance(device, DeviceSpec) else str(device).partition(":")[0]
    return all(tensor.device.type == kind for tensor in tensors)


def _home(tensors: Sequence[Tensor]) -> torch.device | str:
    return next((tensor.device for tensor in tensors if not tensor.is_meta), ASSUMED)
