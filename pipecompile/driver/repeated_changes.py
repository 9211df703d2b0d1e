"""Warnings of state that `pipe(x)` does not leave as a call on the whole mini-batch does: each of its micro-batches has changed the state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx, nn

from pipecompile.driver.warnings_once import WarningsOnce
from pipecompile.graph.cross_sample import norms_by_node
from pipecompile.graph.left_rules import LeftRule
from pipecompile.torch_private.fx_graphs import target_text
from pipecompile.tracing.emit.value_nodes import CONSTANT
from pipecompile.tracing.node_facts import facts
from pipecompile.tracing.opaque.opaque_module import OpaqueModule
from pipecompile.tracing.traced_graph import TracedGraph

__all__ = ["repeated_changes", "warn_of_repeated"]

_REPEATABLE = frozenset(
    ("clamp_", "clamp_min_", "clamp_max_", "clip_", "abs_", "relu_", "fill_", "zero_", "nan_to_num_")
)
"""In-place methods that change nothing when they are called again."""

_NAMED = 4
"""Names in a warning, of a model that has such state in each layer."""


def warn_of_repeated(graph: TracedGraph, model: nn.Module, left: Sequence[LeftRule], warnings: WarningsOnce) -> None:
    """Warn of tensors that the graph of a model changes in place, and of what it leaves on the model and no rule merges."""
    hint = "Try n_microbatches=1, or pipe.model(x)"
    if names := repeated_changes(graph, model):
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        warnings.once(
            "repeated",
            f"forward changes {', '.join(names[:_NAMED])}{more}: in pipe(x) once for each micro-batch, and on the whole mini-batch once. {hint}",
        )
    for rule in left:
        if rule.line:
            warnings.once(
                "unmerged",
                f"what forward leaves in {rule.place.key!r} cannot be put together from micro-batches, because of {rule.line}: after pipe(x)"
                f" it is that of the last one. {hint}",
            )


def repeated_changes(graph: TracedGraph, model: nn.Module) -> list[str]:
    """Return the names of parameters and buffers that calls of the graph of a model change in place, such that a second call changes them
    again.

    Layers are left out, and buffers of BatchNorm layers of the user's own classes: BatchNorm has a warning of its own. Of submodules kept
    whole, the parameters are known that they have written.
    """
    owned = [node for node in graph.graph.nodes if node.op == "get_attr"]
    written = frozenset[int]().union(*(facts(node).mutates for node in graph.graph.nodes if _is_repeated(graph, node)))
    found = {str(node.target) for node in owned if facts(node).storages & written}
    statistics = {id(one) for layer in norms_by_node(graph, model).values() for one in layer.buffers()}
    normed = {name for name, one in model.named_buffers(remove_duplicate=False) if id(one) in statistics}
    names = {name for name in found - normed if not name.startswith(CONSTANT)}
    names |= set(graph.facts.carried.names) if graph.facts.carried and names != found else set()
    pieces = {path: one for path, one in graph.named_modules() if isinstance(one, OpaqueModule)}
    by_pieces = {id(tensor) for piece in pieces.values() for tensor in piece.written}
    every = graph.named_parameters(remove_duplicate=False)
    own = {name for name, one in every if id(one) in by_pieces and name.rpartition(".")[0] not in pieces}
    held = frozenset[int]().union(*(facts(node).storages for node in owned))
    return sorted(names | (own or _unnamed(graph, held)))


def _unnamed(graph: TracedGraph, named: frozenset[int]) -> set[str]:
    """Return the names of the pieces, without submodules, that change memory of the model which nothing but pieces reads: not `named`."""
    found = set()
    for node in graph.graph.find_nodes(op="call_module"):
        if _is_repeated(graph, node):
            given = frozenset[int]().union(*(facts(one).storages for one in node.all_input_nodes))
            piece: Any = graph.get_submodule(str(node.target)).piece
            found |= {f"state in {piece.text}"} if facts(node).mutates - given - named else set()
    return found


def _is_repeated(graph: TracedGraph, node: fx.Node) -> bool:
    """Return whether a second call of a node may change again what it has changed: of a piece that is a submodule, all buffers count as
    changed, so it is left out.
    """
    if node.op == "call_module":
        called = graph.get_submodule(str(node.target))
        return isinstance(called, OpaqueModule) and not called.piece.is_module
    return node.op in ("call_function", "call_method") and target_text(node).rpartition(".")[2] not in _REPEATABLE
