"""Transfer of a cut to another recording of the same model: another shape, another mode, a loop of another length.

    recorded at 4 steps     cell cell │ cell cell          at 6 steps     cell cell cell │ cell cell cell

Calls are alike if they have the same opcode, target and module. The n calls of a kind are mapped to the m calls of the first recording
in order, call i to call i * m // n, and take its stage. Then stages are raised until precedence and ties hold. Where the cut separates
a value and an operation that writes into it, the ties are those with copies.

The fingerprint identifies the graph of a cut in plan files: the hash of its nodes as lines.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from torch import fx

from pipecompile.errors import PlanError
from pipecompile.graph.colocation import compute_nodes, ties_of, ties_with_copies
from pipecompile.tracing.graph_facts import Ties
from pipecompile.tracing.node_facts import facts
from pipecompile.tracing.traced_graph import TracedGraph
from pipecompile.verifiers.plan import verify_cut

__all__ = ["Cut", "check_fingerprint", "fingerprint", "node_lines", "transfer_cut", "verify_exact_cut"]


Kind = tuple[str, str, str]


def transfer_cut(stage_of: Mapping[str, int], graph: TracedGraph, n_stages: int) -> dict[str, int]:
    """Return the cut of a plan on a graph: nodes keep their stage by name, and a new node takes the stage of its inputs.

    Raise PlanError if the plan does not have half of the nodes.
    """
    nodes = compute_nodes(graph)
    unknown = [node.name for node in nodes if node.name not in stage_of]
    if 2 * len(unknown) > len(nodes):
        raise PlanError(
            f"the plan is for another model: {len(unknown)} of {len(nodes)} nodes are not in it",
            where=", ".join(unknown[:5]),
            hint="compile without plan= to make a new one",
        )
    return _legal({node.name: stage_of.get(node.name, 0) for node in nodes}, graph, n_stages)


def verify_exact_cut(stage_of: Mapping[str, int], graph: TracedGraph, n_stages: int) -> None:
    """Raise PlanError unless the cut covers exactly the nodes of this graph, and VerifyError with every fault unless it is legal."""
    differ = stage_of.keys() ^ {node.name for node in compute_nodes(graph)}
    if differ:
        raise PlanError(
            "the plan is damaged: it does not cover the graph that it is for", where=", ".join(sorted(differ)[:5]),
            hint="compile without plan= to make a new one",
        )  # fmt: skip
    ties = _ties(graph, stage_of)
    verify_cut(stage_of, _edges(graph, ties), ties.groups, n_stages)


@dataclass(frozen=True, slots=True)
class Cut:
    """The cut of one recording without the recording: per kind of call the stages of its calls, in graph order."""

    stages: Mapping[Kind, tuple[int, ...]]
    n_stages: int

    @classmethod
    def of(cls, graph: TracedGraph, stage_of: Mapping[str, int], n_stages: int) -> Cut:
        found: defaultdict[Kind, list[int]] = defaultdict(list)
        for node in compute_nodes(graph):
            found[_kind(node)].append(stage_of[node.name])
        return cls({kind: tuple(stages) for kind, stages in found.items()}, n_stages)

    def on(self, graph: TracedGraph) -> dict[str, int] | None:
        """Return the same cut on another graph; None if the cut does not have half of the graph's calls."""
        nodes = compute_nodes(graph)
        now, seen, stages = Counter(map(_kind, nodes)), Counter[Kind](), dict[str, int]()
        for node in nodes:
            kind = _kind(node)
            before = self.stages.get(kind, (0,))
            stages[node.name] = before[seen[kind] * len(before) // now[kind]]
            seen[kind] += 1
        known = sum(count for kind, count in now.items() if kind in self.stages)
        return None if 2 * known < len(nodes) else _legal(stages, graph, self.n_stages)


def _kind(node: fx.Node) -> Kind:
    target = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return node.op, target, facts(node).module


def _legal(stages: dict[str, int], graph: TracedGraph, n_stages: int) -> dict[str, int]:
    """Return the stages, raised until no edge goes back and tied nodes share a stage."""
    ties = _ties(graph, stages)
    edges, groups = _edges(graph, ties), ties.groups
    while True:
        before = dict(stages)
        for a, b in edges:
            stages[b] = max(stages[a], stages[b])
        for group in groups:
            stages.update(dict.fromkeys(group, max(stages[name] for name in group)))
        if stages == before:
            verify_cut(stages, edges, groups, n_stages)
            return stages


def _ties(graph: TracedGraph, stage_of: Mapping[str, int]) -> Ties:
    """Return the ties of the graph, or those with copies if the stages separate a value and an operation that writes into it."""
    ties = ties_of(graph)
    if all(len({stage_of[name] for name in group}) == 1 for group in ties.groups):
        return ties
    loose, copied = ties_with_copies(graph)
    return loose if any(stage_of[value] != stage_of[writer] for value, writer in copied) else ties


def _edges(graph: TracedGraph, ties: Ties) -> list[tuple[str, str]]:
    """Return all pairs (a, b) with stage(a) <= stage(b)."""
    nodes = compute_nodes(graph)
    names = {node.name for node in nodes}
    read = [(source.name, node.name) for node in nodes for source in node.all_input_nodes if source.name in names]
    return [*read, *ties.precedence]


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
