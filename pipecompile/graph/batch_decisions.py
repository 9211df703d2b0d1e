"""Pieces kept whole in which Python decides by the values of a batch: statements that leave a number, functions that return one.

if h.sum() > 1: scale = 0.5        every micro-batch has a sum of its own: on the whole mini-batch the number may be another one
"""

from __future__ import annotations

from collections.abc import Iterator

from pipecompile.graph.batch_rows import takes_samples
from pipecompile.tracing.node_facts import facts
from pipecompile.tracing.opaque.opaque_module import OpaqueModule
from pipecompile.tracing.traced_graph import TracedGraph
from pipecompile.tracing.user_source import line_of

__all__ = ["deciding_lines"]


def deciding_lines(graph: TracedGraph) -> Iterator[str]:
    """Yield the line of every statement kept whole that takes samples and leaves a number or a bool, and of calls that return no more."""
    for node in graph.graph.nodes:
        module = graph.get_submodule(str(node.target)) if node.op == "call_module" else None
        if isinstance(module, OpaqueModule) and takes_samples(node, graph.facts.symbol):
            leaves = module.expected_results[node.args[0]].leaves
            numbers = [leaf for leaf in leaves if leaf.dtype is None and isinstance(leaf.value, int | float)]
            if numbers and (module.piece.block or len(numbers) == len(leaves)):
                yield line_of(facts(node).source) or node.name
