"""The tail of a graph that runs on the whole mini-batch, for outputs that no rule merges from micro-batches.

    stages      x ─► h ─► y          in micro-batches; y departs
    tail        y ─► y.flip(0)       once, on the joined y

The tail begins behind the last values that merge exactly. It keeps the user's operations in their order, and autograd records it,
so its gradient reaches the stages through the merged values.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from pipecompile.batching.merging import MergeKind, MergeRule
from pipecompile.graph.batch_flow import BatchFlow
from pipecompile.graph.colocation import compute_nodes
from pipecompile.graph.gradient_paths import differentiated
from pipecompile.graph.module_names import held_tensors
from pipecompile.graph.stages import Stage, extract
from pipecompile.tracing.node_facts import facts
from pipecompile.tracing.traced_graph import TracedGraph
from pipecompile.tracing.user_source import line_of

__all__ = ["WholeBatchTail", "changed_state", "meeting_line", "mixing_line", "shared_draws", "tail_refusal"]


@dataclass(frozen=True, slots=True)
class WholeBatchTail:
    """The tail of one graph: `stage` computes `outputs` from the merged values of `rules`, and from inputs of the model.

    `rest` are the nodes that the stages compute. `device` is where the tail runs.
    """

    stage: Stage
    rules: Mapping[str, MergeRule]
    departing: tuple[fx.Node, ...]
    rest: frozenset[str]
    device: torch.device

    @classmethod
    def of(
        cls, flow: BatchFlow, ends: Sequence[fx.Node], others: Sequence[fx.Node], device: torch.device
    ) -> WholeBatchTail:
        """Return the tail that computes `ends`. `others` are the outputs that merge by rules."""
        graph = flow.graph
        inputs, region = flow.region_of(ends)
        departing = tuple(node for node in inputs if node.op != "placeholder")
        rest = _kept(compute_nodes(graph), {*departing, *others}, set(region))
        stage = extract(graph, region, inputs, ends, device)
        return cls(stage, {node.name: flow.rule(node) for node in departing}, departing, rest, device)

    def run(self, merged: Mapping[str, Any], size: int) -> dict[str, Any]:
        """Return the outputs of the tail for a mini-batch of `size` samples, from the merged values by name."""
        values = [merged[name] for name in self.stage.inputs]
        arguments = [value.to(self.device) if isinstance(value, torch.Tensor) else value for value in values]
        results = self.stage.module(*arguments, size) if self.stage.sized else self.stage.module(*arguments)
        return dict(zip(self.stage.outputs, results, strict=True))


def _kept(nodes: Sequence[fx.Node], wanted: set[fx.Node], tail: set[fx.Node]) -> frozenset[str]:
    """Return the names of the nodes that are not of the tail alone. Writes to memory that they read later are among them."""
    needed = set(wanted)
    memory = {storage for node in wanted for storage in facts(node).storages}
    for node in reversed(nodes):
        if node in needed or node not in tail or facts(node).mutates & memory:
            needed |= set(node.all_input_nodes) | {node}
            memory |= {storage for one in (node, *node.all_input_nodes) for storage in facts(one).storages}
    return frozenset(node.name for node in nodes if node in needed)


def mixing_line(flow: BatchFlow, node: fx.Node) -> str:
    """Return the user's line of the first call on the way to `node` that makes samples meet; its own line if none is known."""
    return meeting_line(flow, node) or line_of(facts(node).source) or node.name


def meeting_line(flow: BatchFlow, node: fx.Node) -> str:
    """Return the user's line of the first call on the way to `node` that makes samples meet; "" if none is known."""
    _, region = flow.region_of([node])
    return next((line_of(facts(one).source) or one.name for one in region if one in flow.mixing), "")


def tail_refusal(flow: BatchFlow, ends: Sequence[fx.Node], *, is_shared_memory: bool) -> str:
    """Return why the tail of `ends` cannot run on the whole mini-batch, "" if it can.

    With `is_shared_memory` False, the parameters are on several devices or ranks.
    """
    graph = flow.graph
    inputs, region = flow.region_of(ends)
    owned = {key for node in graph.graph.nodes if node.op == "get_attr" for key in facts(node).storages}
    if any(facts(node).draws for node in region) or not shared_draws(flow).isdisjoint(inputs):
        return "random numbers are drawn behind that line, and once for the whole batch they would be others"
    if any(_changes_model(flow, node, owned) for node in region):
        return "the model changes its own state behind that line"
    if not is_shared_memory and any(held_tensors(graph, node) for node in region):
        return "parameters are used behind that line, and they are on several devices"
    changed = changed_state(graph)
    if any(source in changed for one in region for source in one.all_input_nodes if source not in region):
        return "state of the model that every micro-batch changes is read behind that line"
    if any(_differentiates(flow, node, region) for node in region):
        return "autograd.grad differentiates there with respect to values from before that line"
    place = {node: index for index, node in enumerate(graph.graph.nodes)}
    for node in inputs:
        writes = [place[one] for one in compute_nodes(graph) if facts(one).mutates & facts(node).storages]
        if node.op == "placeholder" and writes:
            return "the model writes into its input"
        if any(
            write > place[node] and any(place[user] < write for user in node.users if user in region)
            for write in writes
        ):
            return f"{node.name} is written in place later"
    return ""


def shared_draws(flow: BatchFlow) -> set[fx.Node]:
    """Return the random values that all samples share, such as `torch.randint(0, 8, (3,))`, and what is computed from them alone.

    Every micro-batch draws its own: none of them is that of the mini-batch.
    """
    drawn, memory = set[fx.Node](), set[int]()
    for node in compute_nodes(flow.graph):
        sources = node.all_input_nodes
        is_drawn = facts(node).draws or any(one in drawn or facts(one).storages & memory for one in sources)
        if is_drawn and all(rule.kind is MergeKind.SAME for rule in flow.rules[node]):
            drawn.add(node)
            memory |= facts(node).mutates
    return drawn | {node for node in flow.rules if facts(node).storages & memory}


def changed_state(graph: TracedGraph) -> set[fx.Node]:
    """Return the values that are computed from a parameter or buffer that the graph writes into, before the write or after it.

    They differ from micro-batch to micro-batch, as in a loop: only what has a row per sample can be put together.
    """
    nodes = compute_nodes(graph)
    owned = {key for node in graph.graph.nodes if node.op == "get_attr" for key in facts(node).storages}
    written = {key for node in nodes for key in facts(node).mutates & owned}
    changed: set[fx.Node] = set()
    for node in nodes:
        reads = {key for source in node.all_input_nodes for key in facts(source).storages}
        if written & (reads | facts(node).storages) or any(source in changed for source in node.all_input_nodes):
            changed.add(node)
    return changed


def _differentiates(flow: BatchFlow, node: fx.Node, region: Collection[fx.Node]) -> bool:
    """Return whether a node is a call of `autograd.grad` whose graph lies in part outside of the region."""
    if node.target is not torch.autograd.grad:
        return False
    nodes = list(flow.graph.graph.nodes)
    return not set(differentiated(node, nodes[: nodes.index(node) + 1])) <= set(region)


def _changes_model(flow: BatchFlow, node: fx.Node, owned: set[int]) -> bool:
    if facts(node).mutates & owned:
        return True
    layer = flow.graph.get_submodule(str(node.target)) if node.op == "call_module" else None
    return layer is not None and layer.training and next(layer.buffers(), None) is not None
