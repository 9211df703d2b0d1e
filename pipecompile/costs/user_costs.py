"""Costs given by the user: seconds of single modules over a cost model, or a function for all nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from numbers import Integral
from typing import Any

from torch import fx

from pipecompile.costs.node_cost import CostProvider, NodeCost
from pipecompile.errors import InputError, PipecompileError, described
from pipecompile.graph.colocation import compute_nodes
from pipecompile.graph.module_names import nodes_of_module
from pipecompile.text.input_checks import LARGEST_OPTION, amount
from pipecompile.text.shown_value import shown, type_text

__all__ = ["UserCosts", "costs_from_provider", "with_user_costs"]

UserCosts = Mapping[str, float] | CostProvider
"""Seconds of forward and backward together, by name of module; or a function of (graph, inputs)."""


def with_user_costs(
    graph: fx.GraphModule, costs: Mapping[str, NodeCost], seconds_of: Mapping[str, float]
) -> dict[str, NodeCost]:
    """Return `costs` with the time of every module in `seconds_of` replaced, in the proportions of the cost model."""
    result = dict(costs)
    for name, seconds in seconds_of.items():
        if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 <= seconds < float("inf"):
            raise InputError(
                f"costs: {shown(name)} takes {shown(seconds)} seconds",
                hint=f"pass seconds of forward and backward together: costs={{{name!r}: 0.01}}",
            )
        nodes = nodes_of_module(graph, name, "costs")
        total = sum(costs[node].forward + costs[node].backward for node in nodes)
        for node in nodes:
            cost = costs[node]
            if total:
                share = seconds / total
                times = cost.forward, cost.backward, cost.weight_grad, cost.dividing
                forward, backward, weight, dividing = (part * share for part in times)
                result[node] = replace(
                    cost, forward=forward, backward=backward, weight=weight, dividing=dividing, spread=0.0
                )
            else:  # a backward usually takes twice the forward
                each = seconds / len(nodes)
                result[node] = replace(
                    cost, forward=each / 3, backward=2 * each / 3, weight=None, dividing=0.0, spread=0.0
                )
    return result


def costs_from_provider(graph: fx.GraphModule, inputs: Sequence[object], provider: CostProvider) -> dict[str, NodeCost]:
    """Return the costs of a function. Raise InputError if a node is missing."""
    try:
        costs = provider(graph, inputs)
    except PipecompileError:
        raise
    except Exception as error:
        fault = described(error)
        raise InputError("costs: the function failed", why=fault, hint="a function of (graph, inputs)") from error
    if not isinstance(costs, Mapping):
        raise InputError(f"costs: the function returned {type_text(costs)}", hint="a dict with a NodeCost by node.name")
    missing = [node.name for node in compute_nodes(graph) if not isinstance(costs.get(node.name), NodeCost)]
    if missing:
        raise InputError(
            f"costs: the function returned no NodeCost for {len(missing)} node{'s' * (len(missing) != 1)}",
            where=", ".join(missing[:5]), hint="return a dict with a NodeCost for every compute node, by node.name",
        )  # fmt: skip
    return {name: _with_numbers(name, cost) if isinstance(cost, NodeCost) else cost for name, cost in costs.items()}


_NUMBERS = ("forward", "backward", "saved_bytes", "output_bytes", "spread", "weight", "dividing", "flops")


def _with_numbers(node: str, cost: NodeCost) -> NodeCost:
    """Return the cost with Python's numbers. Raise InputError if a field is not a number, or a number that cannot be computed with."""
    values = {field: getattr(cost, field) for field in _NUMBERS if field != "weight" or cost.weight is not None}
    sizes: dict[str, Any] = {
        field: amount(f"costs[{shown(node)}].{field}", value, largest=LARGEST_OPTION) for field, value in values.items()
    }
    sizes |= {field: int(value) for field, value in values.items() if isinstance(value, Integral)}
    return replace(cost, **sizes)
