"""Warnings of state that `pipe(x)` does not leave as a call on the whole mini-batch does: each of its micro-batches has changed the state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx, nn
from torch.nn import functional

from pipecompile.driver.warnings_once import WarningsOnce
from pipecompile.graph.cross_sample import norms_by_node
from pipecompile.graph.left_rules import LeftRule
from pipecompile.torch_private.fx_graphs import target_text
from pipecompile.torch_private.modules import NormBase, forward_hooks_of
from pipecompile.tracing.emit.call_description import model_path
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
        warnings.once(
            "repeated",
            f"forward changes {_listed(names)}: in pipe(x) once for each micro-batch, and on the whole mini-batch once. {hint}",
        )
    if names := sorted(graph.facts.left):
        warnings.once(
            "left",
            f"hooks of layers, and pieces kept whole, leave {_listed(names)}: in pipe(x) once for each micro-batch, and not what the whole"
            f" mini-batch leaves. {hint}",
        )
    for rule in left:
        if rule.line:
            warnings.once(
                "unmerged",
                f"what forward leaves in {rule.place.key!r} cannot be put together from micro-batches, because of {rule.line}: after pipe(x)"
                f" it is that of the last one. {hint}",
            )


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f"{', '.join(names[:_NAMED])}{more}"


def repeated_changes(graph: TracedGraph, model: nn.Module) -> list[str]:
    """Return the names of parameters and buffers that calls of the graph of a model change in place, such that a second call changes them
    again.

    Buffers of BatchNorm layers, and of the user's own ones, are left out: BatchNorm has a warning of its own. Of layers and submodules kept
    whole, the tensors are known that they have written.
    """
    owned = [node for node in graph.graph.nodes if node.op == "get_attr"]
    written = frozenset[int]().union(*(facts(node).mutates for node in graph.graph.nodes if _is_repeated(graph, node)))
    found = {str(node.target) for node in owned if facts(node).storages & written}
    layers = [one for one in model.modules() if isinstance(one, NormBase)]
    statistics = {id(one) for layer in (*layers, *norms_by_node(graph, model).values()) for one in layer.buffers()}
    normed = {name for name, one in model.named_buffers(remove_duplicate=False) if id(one) in statistics}
    found |= graph.facts.written
    names = {name for name in found - normed - _renormalised(graph) if not name.startswith(CONSTANT)}
    names |= set(graph.facts.carried.names) if graph.facts.carried and names != found else set()
    pieces = {path: one for path, one in graph.named_modules() if isinstance(one, OpaqueModule)}
    by_pieces = {id(tensor) for piece in pieces.values() for tensor in piece.written}
    every = graph.named_parameters(remove_duplicate=False)
    own = {name for name, one in every if id(one) in by_pieces and name.rpartition(".")[0] not in pieces}
    held = frozenset[int]().union(*(facts(node).storages for node in owned))
    return sorted(names | (own or _unnamed(graph, held)))


def _renormalised(graph: TracedGraph) -> set[str]:
    """Return the names of the tables of embeddings with `max_norm` which nothing else reads: each call scales the rows that it reads, and
    another call does not scale them again.
    """
    calls = [node for node in graph.graph.nodes if _is_embedding(graph, node)]
    read = frozenset[int]()
    for node in graph.graph.nodes:
        given = () if node in calls else (facts(one).storages for one in node.all_input_nodes)
        read = read.union(*given, () if node in calls else facts(node).reads)
    alone = [node for node in calls if not facts(node).mutates & read]
    layers = {f"{model_path(str(node.target))}.weight" for node in alone if node.op == "call_module"}
    sources = {one for node in alone for one in node.all_input_nodes if facts(one).storages & facts(node).mutates}
    return layers | {str(one.target) for one in sources}


def _is_embedding(graph: TracedGraph, node: fx.Node) -> bool:
    """Return whether a node is a call of an embedding without hooks of the user."""
    if node.op == "call_module":
        layer = graph.get_submodule(str(node.target))
        return isinstance(layer, (nn.Embedding, nn.EmbeddingBag)) and not any(forward_hooks_of(layer))
    return node.target in (functional.embedding, functional.embedding_bag)


def _unnamed(graph: TracedGraph, named: frozenset[int]) -> set[str]:
    """Return the names of the pieces, without submodules, that may change memory of the model which nothing but pieces reads: not `named`.
    Pieces that trial runs have seen to change tensors have these named.
    """
    found = set()
    for node in graph.graph.find_nodes(op="call_module"):
        if _is_repeated(graph, node):
            given = frozenset[int]().union(*(facts(one).storages for one in node.all_input_nodes))
            called: Any = graph.get_submodule(str(node.target))
            is_unnamed = not called.changed and facts(node).mutates - given - named
            found |= {f"state in {called.piece.text}"} if is_unnamed else set()
    return found


def _is_repeated(graph: TracedGraph, node: fx.Node) -> bool:
    """Return whether a second call of a node may change again what it has changed: of a piece that is a submodule, all buffers count as
    changed, so it is left out.
    """
    if node.op == "call_module":
        called = graph.get_submodule(str(node.target))
        return isinstance(called, OpaqueModule) and not called.piece.is_module
    return node.op in ("call_function", "call_method") and target_text(node).rpartition(".")[2] not in _REPEATABLE
