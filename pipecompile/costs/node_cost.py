"""The cost of one node for one micro-batch, the protocol of functions that provide costs, and what W has of the nodes of a stage.

input ─► a ─► b ─► out        b and a lead to an input that needs a gradient: W has their weight gradients only
          c ─► d ─► out       c and d lead to no such input: W has all of their backward, as in a first stage
          e ─► b              e does neither, but I passes through b and computes the gradient of e along the way
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import fx

from pipecompile.errors import PipecompileError
from pipecompile.graph.module_names import held_tensors
from pipecompile.tracing.node_facts import facts, value_of

__all__ = [
    "CostError",
    "CostProvider",
    "NodeCost",
    "WeightGradCost",
    "nodes_needing_grad",
    "weight_grad_cost",
    "with_recomputation",
]


class CostError(PipecompileError):
    """A node failed while its cost was measured. `where` is its line in the user's file; the original error is the
    cause.
    """


@dataclass(frozen=True, slots=True)
class NodeCost:
    """Seconds and bytes of one node for one micro-batch.

    forward, backward   seconds
    saved_bytes         bytes that autograd saves for this backward, without parameters and buffers; a storage saved by
                        several nodes counts once in the graph, at the first node
    output_bytes        size of the tensors in the result, also of views: the bytes to send
    spread              interquartile range of the measured time over its median; 0 if not measured
    weight              seconds of `backward` that W can do; None if unknown: half of `backward`
    dividing            seconds that I and W together take beyond `backward`; they count for W
    saves               names of the nodes whose results are in `saved_bytes`
    flops               FLOPs of the forward; a multiplication and an addition count as two
    adding              seconds of `backward`, and of W, that add gradients of parameters to those of the micro-batch before
    """

    forward: float
    backward: float
    saved_bytes: int
    output_bytes: int
    spread: float = 0.0
    weight: float | None = None
    dividing: float = 0.0
    saves: frozenset[str] = frozenset()
    flops: float = 0.0
    adding: float = 0.0

    @property
    def weight_grad(self) -> float:
        """Return the seconds of W."""
        return self.backward / 2 if self.weight is None else self.weight

    def with_less_adding(self, seconds: float) -> NodeCost:
        """Return this cost without some of the seconds of `adding`."""
        weight = None if self.weight is None else max(self.weight - seconds, 0.0)
        return replace(self, backward=self.backward - seconds, weight=weight, adding=self.adding - seconds)


def with_recomputation(graph: fx.GraphModule, costs: Mapping[str, NodeCost]) -> dict[str, NodeCost]:
    """Return costs in which the backward of a node in a region of the user's own checkpointing runs the forward again.

    What a region saved is in `saved_bytes` already. I has the whole backward of a region, since the first gradient recomputes it.
    """
    inside = {node.name for node in graph.graph.nodes if facts(node).region is not None}
    return {
        name: replace(cost, backward=cost.forward + cost.backward, weight=0.0, dividing=0.0) if name in inside else cost
        for name, cost in costs.items()
    }


class CostProvider(Protocol):
    """A function from a traced graph and one micro-batch to the cost of every compute node, by node name.

    `inputs` are the flat values of the placeholders, in order: tensors (real, meta or fake) or constants. The result
    has an entry for every `call_module`, `call_function` and `call_method` node.
    """

    def __call__(self, graph: fx.GraphModule, inputs: Sequence[object]) -> dict[str, NodeCost]: ...


def nodes_needing_grad(graph: fx.GraphModule) -> set[fx.Node]:
    """Return the nodes whose value requires a gradient: computed from a trained parameter or from an input that
    requires one.
    """
    result: set[fx.Node] = set()
    for node in graph.graph.nodes:
        value = value_of(node)
        if node.op == "placeholder":
            needs_grad = isinstance(value, torch.Tensor) and value.requires_grad
        else:
            held = () if node.op in ("get_attr", "output") else held_tensors(graph, node)
            needs_grad = any(t.requires_grad for t in held) or any(source in result for source in node.all_input_nodes)
        if needs_grad:
            result.add(node)
    return result


@dataclass(frozen=True, slots=True)
class WeightGradCost:
    """The cost of one stage's W: `seconds`, of which `dividing` are due to the division, and the bytes kept for W."""

    seconds: float
    dividing: float
    saved_bytes: float


def weight_grad_cost(
    nodes: Sequence[fx.Node], costs: Mapping[str, NodeCost], needing_grad: set[fx.Node]
) -> WeightGradCost:
    """Return the cost of W for one stage with `nodes` in order.

    `needing_grad` are the nodes of the graph whose value needs a gradient. W has the whole backward of each node that
    is not inward and feeds no inward node. An inward node leads from an input that needs a gradient; of its backward W
    has the weight gradients, and W keeps the node's inputs and the gradient of its output. Received values stay with
    the graph, and so does what regions of the user's own checkpointing saved, if W has anything to do.
    """
    own, inward = set(nodes), set[fx.Node]()
    for node in nodes:
        if any(source in inward or (source not in own and source in needing_grad) for source in node.all_input_nodes):
            inward.add(node)
    absorbed = set[fx.Node]()
    for node in reversed(nodes):
        if any(user in inward or user in absorbed for user in node.users):
            absorbed.add(node)
    divided = [node for node in nodes if node in inward and costs[node.name].weight_grad]
    recomputed = [node for node in nodes if facts(node).region is not None and node in inward and divided]
    kept_inputs = {source for node in divided for source in node.all_input_nodes if source in own}
    divided_costs = [costs[node.name] for node in divided]
    whole_costs = [costs[node.name] for node in nodes if node not in inward and node not in absorbed]
    return WeightGradCost(
        sum(each.backward for each in whole_costs) + sum(each.weight_grad for each in divided_costs),
        sum(each.dividing for each in divided_costs),
        sum(each.saved_bytes for each in whole_costs)
        + sum(each.output_bytes for each in divided_costs)
        + sum(costs[node.name].output_bytes for node in kept_inputs)
        + sum(costs[node.name].saved_bytes for node in recomputed),
    )
