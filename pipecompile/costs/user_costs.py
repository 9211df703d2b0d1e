"""Costs that the user knows better: of single modules over a cost model, or all of them by a function."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import fx

from pipecompile.costs.node_cost import CostProvider, NodeCost
from pipecompile.errors import InputError
from pipecompile.graph.colocation import compute_nodes
from pipecompile.graph.module_names import named

__all__ = ["Given", "overridden", "provided"]

Given = Mapping[str, float] | CostProvider
"""Seconds of a module, forward and backward together, by name; or a function of (graph, inputs)."""


def overridden(graph: fx.GraphModule, costs: Mapping[str, NodeCost], given: Mapping[str, float]) -> dict[str, NodeCost]:
    """Costs with the time of every module in `given` set, dealt out to its nodes as the cost model has it."""
    result = dict(costs)
    for name, seconds in given.items():
        if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 <= seconds < float("inf"):
            raise InputError(f"costs: {name!r} takes {seconds!r}", hint="seconds, forward and backward together")
        nodes = named(graph, name, "costs")
        now = sum(costs[node].forward + costs[node].backward for node in nodes)
        for node in nodes:
            cost = costs[node]
            if now:
                share = seconds / now
                times = cost.forward, cost.backward, cost.weight_grad, cost.dividing
                forward, backward, weight, dividing = (part * share for part in times)
                result[node] = replace(
                    cost, forward=forward, backward=backward, weight=weight, dividing=dividing, spread=0.0
                )
            else:  # as a backward usually takes twice the forward
                each = seconds / len(nodes)
                result[node] = replace(
                    cost, forward=each / 3, backward=2 * each / 3, weight=None, dividing=0.0, spread=0.0
                )
    return result


def provided(graph: fx.GraphModule, inputs: Sequence[object], provider: CostProvider) -> dict[str, NodeCost]:
    """What a function gives. Raises InputError when it leaves out a node."""
    costs = provider(graph, inputs)
    missing = [node.name for node in compute_nodes(graph) if not isinstance(costs.get(node.name), NodeCost)]
    if missing:
        raise InputError(
            f"costs: the function has no NodeCost for {len(missing)} nodes", where=", ".join(missing[:5]),
            hint="an entry for every compute node, by name",
        )  # fmt: skip
    return costs
