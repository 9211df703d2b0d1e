"""Rules to merge what a forward leaves on the model, from what it leaves in micro-batches.

self.attention = weights.detach()    (B, T, T)         concatenated, as an output is
self.features.append(h)              one item a call   the same, item by item
self.calls += 1                                        what the first micro-batch has left
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from pipecompile.batching.containers import flatten_containers
from pipecompile.batching.merging import MergeKind, MergeRule
from pipecompile.graph.batch_flow import BatchFlow
from pipecompile.tracing.node_facts import facts, value_of
from pipecompile.tracing.state.effect_places import EffectPlace
from pipecompile.tracing.traced_graph import TracedGraph
from pipecompile.tracing.user_source import line_of

__all__ = ["LeftRule", "fixed_left_rules", "left_rules"]

_SAME = MergeRule(MergeKind.SAME)


@dataclass(frozen=True, slots=True)
class LeftRule:
    """The rules for the leaves of what an effect node leaves at a place; () for a count, of which the first micro-batch decides. `line` is the
    user's line that computes a leaf that no rule merges, or the reason, "" if all merge.
    """

    place: EffectPlace
    leaves: tuple[MergeRule, ...] = ()
    line: str = ""

    @property
    def is_queue(self) -> bool:
        """Return whether items are appended to a deque."""
        return self.place.key is None and isinstance(self.place.container, deque)


def left_rules(flow: BatchFlow) -> tuple[LeftRule, ...]:
    """Return the rules of the effect nodes of a graph, but for sums of sizes, which micro-batches add up as the mini-batch does."""
    return tuple(_rules(flow))


def fixed_left_rules(graph: TracedGraph) -> tuple[LeftRule, ...]:
    """Return the rules of the effect nodes of a graph for one batch size. No rule merges counts, whose steps may be batch sizes, and what is
    computed from the inputs.
    """
    nodes = [node for node in graph.graph.nodes if hasattr(node.target, "place")]
    given = _computed_from_inputs(graph)
    return tuple(LeftRule(one.target.place, line=_FIXED) for one in nodes if one.target.place.is_count or one in given)


_FIXED = "the model's decision on the batch size"


def _computed_from_inputs(graph: TracedGraph) -> set[fx.Node]:
    """Return the nodes with an input of the graph that is a tensor among their ancestors."""
    found = set[fx.Node]()
    for node in graph.graph.nodes:
        is_input = node.op == "placeholder" and isinstance(value_of(node), torch.Tensor)
        if is_input or not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found


def _rules(flow: BatchFlow) -> Iterator[LeftRule]:
    for node in flow.graph.graph.nodes:
        place = getattr(node.target, "place", None) if node.op == "call_function" else None
        if place is not None and place.is_count and not node.args:
            yield LeftRule(place)
        elif place is not None and not place.is_count:
            leaves = flatten_containers(node.args[0])[0]
            rules = tuple(_rule(flow, leaf) for leaf in leaves)
            unmerged = [leaf for leaf, rule in zip(leaves, rules, strict=True) if rule.kind in _UNMERGED]
            line = line_of(facts(unmerged[0]).source) or unmerged[0].name if unmerged else ""
            yield LeftRule(place, rules, line)


_UNMERGED = (MergeKind.COMPUTED, MergeKind.REFUSED)


def _rule(flow: BatchFlow, leaf: Any) -> MergeRule:
    is_tensor = isinstance(leaf, fx.Node) and isinstance(value_of(leaf), torch.Tensor) and leaf.op != "get_attr"
    return flow.rule(leaf) if is_tensor else _SAME
