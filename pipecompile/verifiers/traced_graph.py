"""What a legal traced graph is: fx's own rules, and every node knowing what the later levels ask of it."""

from __future__ import annotations

from torch import fx

from pipecompile.errors import VerifyError

__all__ = ["verify_graph"]

_KNOWN = ("val", "module", "source", "storages", "mutates")
_COMPUTE = ("call_module", "call_function", "call_method")


def verify_graph(graph: fx.GraphModule) -> None:
    """Raise VerifyError with every fault. Linear in the number of nodes."""
    faults = [fault for node in graph.graph.nodes for fault in _node_faults(node)]
    try:
        graph.graph.lint()
    except (RuntimeError, ValueError) as error:
        faults.append(str(error).splitlines()[0])
    missing = [key for key in ("outside", "out_spec", "guards", "device") if key not in graph.meta]
    faults += [f"the graph does not say its {key!r}" for key in missing]
    if faults:
        raise VerifyError("traced graph", faults)


def _node_faults(node: fx.Node) -> list[str]:
    if node.op == "output" or node.meta.get("scalar") or node.meta.get("switch"):
        return []
    wanted = (*_KNOWN, "ambient") if node.op in _COMPUTE else _KNOWN
    return [
        f"node {node.name} ({node.op} {node.target}) does not say its {key!r}" for key in wanted if key not in node.meta
    ]
