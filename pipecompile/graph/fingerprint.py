"""The identity of a graph in plan files: its nodes as lines, their hash, and the first differences of two graphs."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import zip_longest

from torch import fx

from pipecompile.errors import PlanError

__all__ = ["check_fingerprint", "fingerprint", "node_lines"]

_SHOWN = 3
"""Differences in an error message."""


def node_lines(graph: fx.GraphModule) -> tuple[str, ...]:
    """Return one line per node: name, operation and inputs. Shapes and constants are left out, since a plan serves all of them."""
    return tuple(map(_line, graph.graph.nodes))


def _line(node: fx.Node) -> str:
    target = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return f"{node.name} = {node.op} {target}({', '.join(source.name for source in node.all_input_nodes)})"


def fingerprint(lines: Sequence[str]) -> str:
    """Return the hash of the lines of a graph, 16 hexadecimal digits."""
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def check_fingerprint(planned: Sequence[str], expected: str, graph: fx.GraphModule) -> None:
    """Raise PlanError with the first nodes that differ, unless the plan was made for this graph."""
    lines = node_lines(graph)
    if fingerprint(lines) == expected:
        return
    differ = [
        (number, a, b) for number, (a, b) in enumerate(zip_longest(planned, lines, fillvalue="no node")) if a != b
    ]
    shown = "; ".join(f"node {number}: the plan has {a}, the model {b}" for number, a, b in differ[:_SHOWN])
    raise PlanError(
        "the plan is for another graph"
        + (f": {len(differ)} of {max(len(planned), len(lines))} nodes differ" if planned else ""),
        where=shown,
        why=f"the plan's fingerprint is {expected}, the model's {fingerprint(lines)}",
        hint="compile without plan= to make a new one",
    )
