"""Pieces of a graph that a cut can separate, and why the operations of one piece hold together.

    a ─► b ─► c      c writes a's memory, which b reads as well: a and c share a stage, and so does b, which lies between
    └─────────┘      one piece {a, b, c}

A piece is a strongly connected component of precedence and ties. It is computed for refusals alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import networkx as nx

from pipecompile.errors import PartitionError
from pipecompile.graph.colocation import compute_nodes, reasons_of_ties, ties_with_copies
from pipecompile.text.units import counted
from pipecompile.tracing.opaque.opaque_module import OpaqueModule
from pipecompile.tracing.traced_graph import TracedGraph

__all__ = ["SeparablePiece", "check_pieces", "separable_pieces"]

SHOWN = 3
"""Pieces, and reasons per piece, in an error message."""


@dataclass(frozen=True, slots=True)
class SeparablePiece:
    """Operations that share a stage, in graph order, and the reasons as text."""

    nodes: tuple[str, ...]
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        first, last = self.nodes[0], self.nodes[-1]
        named = ", ".join(self.nodes) if len(self.nodes) <= SHOWN else f"{first} ... {last}"
        return f"{named} ({counted(len(self.nodes), 'operation')})"


def separable_pieces(graph: TracedGraph) -> list[SeparablePiece]:
    """Return the pieces of a graph, the largest first."""
    nodes, (ties, _), reasons = compute_nodes(graph), ties_with_copies(graph), reasons_of_ties(graph)
    order = {node.name: place for place, node in enumerate(nodes)}
    precedence: nx.DiGraph[str] = nx.DiGraph(ties.precedence)
    precedence.add_nodes_from(order)
    precedence.add_edges_from((s.name, node.name) for node in nodes for s in node.all_input_nodes if s.name in order)
    for group in ties.groups:
        nx.add_cycle(precedence, group)
    pieces = []
    for component in nx.strongly_connected_components(precedence):
        why = dict.fromkeys(why for _, _, why in reasons.edges(component, data="why"))
        pieces.append(SeparablePiece(tuple(sorted(component, key=order.__getitem__)), tuple(why)))
    return sorted(pieces, key=lambda piece: (-len(piece.nodes), order[piece.nodes[0]]))


def check_pieces(graph: TracedGraph, n_stages: int) -> None:
    """Raise PartitionError, with the largest pieces and what holds them together, if there are fewer pieces than stages."""
    pieces = separable_pieces(graph)
    if len(pieces) >= n_stages:
        return
    large = [piece for piece in pieces if len(piece.nodes) > 1][:SHOWN]
    where = f"{type(graph).__name__}: {counted(len(pieces), 'piece')} can be separated"
    where += "".join(f"; {piece} hold together" for piece in large)
    reasons = list(dict.fromkeys(why for piece in large for why in piece.reasons))
    more = len(reasons) - SHOWN
    why = "; ".join(reasons[:SHOWN]) + f"; and {more} more" * (more > 0) if reasons else _why_few(len(pieces))
    raise PartitionError(
        f"the model cannot be cut into {counted(n_stages, 'stage')}",
        where=where,
        why="; ".join(filter(None, (why, _why_kept(graph)))),
        hint=f"n_stages={len(pieces)}" + " or fewer" * (len(pieces) > 1)
        if pieces
        else "a model that computes something",
    )


def _why_kept(graph: TracedGraph) -> str:
    """Return why the largest part of the model that is kept whole is kept so, with the user's line; "" if no part is."""
    sizes = {
        one.piece: sum(p.numel() for p in one.parameters()) for one in graph.modules() if isinstance(one, OpaqueModule)
    }
    if not graph.facts.kept:
        return ""
    largest = max(graph.facts.kept, key=lambda reason: sizes.get(reason.piece, 0))
    fault = largest.fault
    place = f", at {fault.file}:{fault.line}: {fault.source}" if fault.file else ""
    return f"{largest.piece.text} is kept whole: {fault.code} {fault.what.removeprefix('cannot trace: ')}{place}"


def _why_few(count: int) -> str:
    return f"the recording has {counted(count, 'operation')}" if count else "no operation was recorded"
