"""Attributes that stages on other ranks leave, and that the loss may read: the last stage leaves them once more, from the value it receives.

rank 0    h ─► square ─► mean ─► keep           self.aux, on the model of rank 0
rank 1                     └───► keep_for_loss  self.aux, on the model of rank 1; its gradient goes back to mean
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from pipecompile.graph.colocation import compute_nodes
from pipecompile.tracing.node_facts import facts, value_of
from pipecompile.tracing.traced_graph import TracedGraph

__all__ = ["is_for_loss", "sendable", "sent_to_loss"]


def is_for_loss(node: fx.Node) -> bool:
    """Return whether a node leaves for the loss what another one leaves for the user."""
    return hasattr(node.target, "for_loss")


def sendable(graph: TracedGraph) -> list[fx.Node]:
    """Return the nodes that leave tensors in attributes. Lists and counts are not sent."""
    found = []
    for node in compute_nodes(graph):
        place = getattr(node.target, "place", None)
        is_attribute = place is not None and place.key is not None and not place.is_count and not is_for_loss(node)
        if is_attribute and all(
            isinstance(value_of(one), torch.Tensor) or facts(one).is_size for one in node.all_input_nodes
        ):
            found.append(node)
    return found


def sent_to_loss(
    graph: TracedGraph, stage_of: Mapping[str, int], last: int, nodes: Sequence[fx.Node]
) -> dict[str, int]:
    """Add nodes to the last stage, `last`, that leave what these nodes leave. Return the stages with theirs."""
    found, output = dict(stage_of), graph.graph.output_node()
    for node in nodes:
        with graph.graph.inserting_before(output):
            twin = graph.graph.call_function(_for_loss(node.target), node.args, node.kwargs)
        twin.meta = dict(node.meta)
        found[twin.name] = last
    return found


def _for_loss(effect: Any) -> Any:
    """Return the function of an effect node under a name of its own."""

    def write(*values: Any) -> None:
        effect(*values)

    write.__name__ = write.__qualname__ = f"{effect.__name__}_for_loss"
    write.place, write.for_loss = effect.place, True  # type: ignore[attr-defined]
    return write
