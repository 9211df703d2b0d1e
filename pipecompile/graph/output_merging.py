"""Rules to merge each output of a model from the outputs of micro-batches, derived from the graph (batch_flow.py).

(B, C), (T, B), (3B, C)      concatenated along the batch dimension
sum, mean, max, any ...      added, averaged by size, the maximum ...
independent of the samples   the value of any micro-batch
a list, one entry a sample   concatenated as a list
everything else              computed on the whole mini-batch, from values that merge (whole_batch.py)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from pipecompile.batching.merging import MergeKind, MergeRule
from pipecompile.graph.batch_flow import BatchFlow
from pipecompile.graph.batch_rows import batch_dim_of
from pipecompile.tracing.node_facts import facts, value_of
from pipecompile.tracing.traced_graph import TracedGraph

__all__ = ["join_rules", "rows_by_shape", "shape_rules"]


def join_rules(flow: BatchFlow) -> tuple[MergeRule, ...]:
    """Return one rule per leaf of the output of a graph; COMPUTED for a leaf that no rule merges."""
    node = flow.graph.graph.output_node()
    arguments: Any = node.args[0]
    return tuple(_rule(flow, argument) for argument in arguments)


def shape_rules(graph: TracedGraph) -> tuple[MergeRule, ...]:
    """Return one rule per leaf by its shape alone: JOINED along the dimension that has the batch, else SAME."""
    dims = [batch_dim_of(value, graph.facts.symbol) for value in value_of(graph.graph.output_node())]
    return tuple(MergeRule(MergeKind.SAME) if dim is None else MergeRule(MergeKind.JOINED, dim) for dim in dims)


def rows_by_shape(graph: TracedGraph, rules: Sequence[MergeRule]) -> tuple[MergeRule, ...]:
    """Return these rules of the output, JOINED for a leaf that no rule merges and that has rows of samples by its shape.

    A loss of a micro-batch takes such rows, whether or not samples have met before.
    """
    pairs = zip(rules, shape_rules(graph), strict=True)
    return tuple(other if rule.kind is MergeKind.COMPUTED and other.dim is not None else rule for rule, other in pairs)


def _rule(flow: BatchFlow, argument: Any) -> MergeRule:
    if not isinstance(argument, fx.Node) or facts(argument).is_size or argument.op == "get_attr":
        return MergeRule(MergeKind.SAME)
    if not isinstance(value_of(argument), torch.Tensor) and flow.rules[argument][:1] != (MergeRule(MergeKind.SAME),):
        return MergeRule(MergeKind.REFUSED, reason="it is a number that depends on the data")
    return flow.rule(argument)
