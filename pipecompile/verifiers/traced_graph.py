"""What a legal traced graph is: fx's own rules, and every node knowing what the later levels ask of it."""

from __future__ import annotations

from torch import fx

from pipecompile.errors import VerifyError
from pipecompile.tracing.node_facts import Role, facts, has_facts
from pipecompile.tracing.traced_graph import TracedGraph

__all__ = ["verify_graph"]

_COMPUTE = ("call_module", "call_function", "call_method")


def verify_graph(graph: TracedGraph) -> None:
    """Raise VerifyError with every fault. Linear in the number of nodes."""
    faults = [fault for node in graph.graph.nodes for fault in _node_faults(node)]
    try:
        graph.graph.lint()
    except (RuntimeError, ValueError) as error:
        faults.append(str(error).splitlines()[0])
    if faults:
        raise VerifyError("traced graph", faults)


def _node_faults(node: fx.Node) -> list[str]:
    if not has_facts(node):
        return [f"node {node.name} ({node.op} {node.target}) has no facts"]
    if node.op in _COMPUTE and facts(node).role is Role.VALUE and facts(node).ambient is None:
        return [f"node {node.name} ({node.op} {node.target}) has no modes"]
    return []
