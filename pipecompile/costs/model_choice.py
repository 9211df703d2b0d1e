"""Selection of the cost model: by name, or the best that the tensors at hand allow."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.fx import GraphModule

from pipecompile.costs.analytic import analytic_costs
from pipecompile.costs.device_specs import DeviceSpec
from pipecompile.costs.node_cost import CostProvider, NodeCost, with_recomputation
from pipecompile.costs.node_run import tensors_in
from pipecompile.costs.profile import REPEATS, Repeats, profiled_costs
from pipecompile.errors import InputError
from pipecompile.text.progress import Task
from pipecompile.text.shown_value import shown
from pipecompile.torch_private.modes import FakeTensor
from pipecompile.tracing.node_facts import has_regions
from pipecompile.tracing.state.preserved_run import state_tensors

__all__ = ["node_costs", "select_cost_model"]

NAMES = ("auto", "analytic", "profile")

ASSUMED = "a100"
"""The device for a model on `meta` if none is given. A balance depends only on the ratio of compute to bandwidth."""


def node_costs(
    graph: GraphModule,
    inputs: Sequence[object],
    *,
    cost: str | CostProvider = "auto",
    device: DeviceSpec | torch.device | str | None = None,
    repeats: Repeats = REPEATS,
    work: Task | None = None,
) -> dict[str, NodeCost]:
    """Return the cost of every compute node of `graph` for one micro-batch `inputs`, by node name.

    **cost:** "profile" measures, "analytic" computes, "auto" measures if all tensors are real and on a `device` of the
    requested kind, and computes otherwise. A function of (graph, inputs) is called.

    **device:** the device for "analytic": a name ("h100"), a torch.device, or a DeviceSpec. None: the device of the
    tensors.

    **repeats:** the number of measurements of "profile"; `work` counts them for the user.

    Raise InputError for an unknown name or device, and for measuring tensors without memory; CostError if a node fails.
    """
    if callable(cost):
        return cost(graph, inputs)
    if select_cost_model(graph, inputs, cost=cost, device=device) == "profile":
        costs = profiled_costs(graph, inputs, repeats=repeats, work=work)
    else:
        tensors = [*state_tensors(graph), *tensors_in(tuple(inputs))]
        costs = analytic_costs(graph, inputs, device=_home(tensors) if device is None else device)
    is_recomputed = torch.is_grad_enabled() and has_regions(graph.graph.nodes)
    return with_recomputation(graph, costs) if is_recomputed else costs


def select_cost_model(
    graph: GraphModule, inputs: Sequence[object], *, cost: str, device: DeviceSpec | torch.device | str | None = None
) -> str:
    """Return the model that `node_costs` uses: "profile" or "analytic". Raise InputError as `node_costs` does."""
    if cost not in NAMES:
        hint = f"pass one of {', '.join(NAMES)}, or a function of (graph, inputs)"
        raise InputError(f"no cost model is called {shown(cost)}", hint=hint)
    tensors = [*state_tensors(graph), *tensors_in(tuple(inputs))]
    is_real = not any(tensor.is_meta or isinstance(tensor, (FakeTensor, DTensor)) for tensor in tensors)
    if cost == "profile" and not is_real:
        raise InputError(
            "only real tensors can be measured",
            why="parameters or inputs are meta, fake, or in parts on several ranks",
            hint='pass cost="analytic"',
        )
    measured = cost == "profile" or (cost == "auto" and is_real and _is_here(device, tensors))
    return "profile" if measured else "analytic"


def _is_here(device: DeviceSpec | torch.device | str | None, tensors: Sequence[Tensor]) -> bool:
    """Return whether measuring on the tensors' device is what `device` requests: no device, or one of their kind."""
    if device is None:
        return True
    kind = device.name if isinstance(device, DeviceSpec) else str(device).partition(":")[0]
    return all(tensor.device.type == kind for tensor in tensors)


def _home(tensors: Sequence[Tensor]) -> torch.device | str:
    return next((tensor.device for tensor in tensors if not tensor.is_meta), ASSUMED)
