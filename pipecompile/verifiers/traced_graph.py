"""Verify a traced graph: fx's own rules, facts on every node, inputs and outputs that match their structures, ties between existing
nodes.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx

from pipecompile.errors import VerifyError
from pipecompile.tracing.node_facts import Role, facts, has_facts, value_of
from pipecompile.tracing.traced_graph import TracedGraph

__all__ = ["graph_faults", "verify_graph"]

_CALLS = ("call_module", "call_function", "call_method")


def verify_graph(graph: TracedGraph) -> None:
    """Raise VerifyError with every fault of the graph. Linear in the number of nodes and edges."""
    if faults := graph_faults(graph):
        raise VerifyError("traced graph", faults)


def graph_faults(graph: TracedGraph) -> list[str]:
    """Return every fault; each names its node and the user's line, or the part of the header."""
    return [*_node_faults(graph), *_input_faults(graph), *_output_faults(graph), *_tie_faults(graph)]


def _node_faults(graph: TracedGraph) -> Iterator[str]:
    above: set[fx.Node] = set()
    names: set[str] = set()
    for node in graph.graph.nodes:
        place = f"node {node.name} ({node.op} {node.target})" + (
            f" at {source}" if (source := facts(node).source) else ""
        )
        yield from (f"{place}: {fault}" for fault in _faults_of(graph, node))
        late = [source.name for source in node.all_input_nodes if source not in above]
        if late:
            yield f"{place}: uses {', '.join(late)}, which {'is' if len(late) == 1 else 'are'} not above the node"
        if node.name in names:
            yield f"{place}: a node above has the same name"
        above.add(node)
        names.add(node.name)
    readers = [node.name for node in graph.graph.nodes if facts(node).role is Role.BATCH_SIZE]
    if len(readers) > 1:
        yield f"{len(readers)} nodes read the batch size, expected at most 1: {', '.join(readers)}"


def _faults_of(graph: TracedGraph, node: fx.Node) -> Iterator[str]:
    if not has_facts(node):
        yield "has no facts: the recorder notes them, and copies of a node must copy node.meta"
    elif node.op in _CALLS and facts(node).role is Role.VALUE and facts(node).ambient is None:
        yield "has no modes (grad mode and autocast)"
    if node.op in ("call_module", "get_attr") and not _exists(graph, node):
        yield f"the graph has no {'module' if node.op == 'call_module' else 'attribute'} {node.target}"


def _exists(graph: TracedGraph, node: fx.Node) -> bool:
    found: object = graph
    for part in str(node.target).split("."):
        if not hasattr(found, part):
            return False
        found = getattr(found, part)
    return node.op == "get_attr" or isinstance(found, torch.nn.Module)


def _input_faults(graph: TracedGraph) -> Iterator[str]:
    inputs = [node for node in graph.graph.nodes if node.op == "placeholder"]
    noted = graph.facts
    counts = {"names": len(noted.names), "dims": len(noted.dims), "leaves of in_spec": noted.in_spec.num_leaves}
    for what, count in counts.items():
        if count != len(inputs):
            yield f"inputs: {count} {what}, expected {len(inputs)}, one per placeholder"
    for node, dim in zip(inputs, noted.dims, strict=False):
        value = value_of(node)
        if isinstance(dim, int) and not (isinstance(value, torch.Tensor) and -value.dim() <= dim < value.dim()):
            yield f"node {node.name} (placeholder): has no dimension {dim} for the batch"


def _output_faults(graph: TracedGraph) -> Iterator[str]:
    outputs = [node for node in graph.graph.nodes if node.op == "output"]
    if len(outputs) != 1:
        yield f"output: {len(outputs)} output nodes, expected 1"
        return
    arguments = outputs[0].args[0] if outputs[0].args else ()
    leaves = len(arguments) if isinstance(arguments, (tuple, list)) else 1
    if leaves != graph.facts.out_spec.num_leaves:
        yield f"output: {leaves} values, expected {graph.facts.out_spec.num_leaves}, one per leaf of out_spec"


def _tie_faults(graph: TracedGraph) -> Iterator[str]:
    if graph.facts.ties is None:
        return
    tied = {name for names in (*graph.facts.ties.groups, *graph.facts.ties.precedence) for name in names}
    if missing := sorted(tied - {node.name for node in graph.graph.nodes}):
        yield f"ties: {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not in the graph"
