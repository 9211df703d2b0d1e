"""Risks of a model that is recorded right: effects that differ between micro-batches and the whole batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch.nn.functional as F
from torch import fx, nn

from pipecompile.graph.batch_rows import takes_samples
from pipecompile.graph.colocation import compute_nodes
from pipecompile.graph.cross_sample import cross_sample_lines
from pipecompile.graph.module_names import held_tensors
from pipecompile.torch_private.modules import BatchNorm, is_hooked, uses_batch_statistics
from pipecompile.tracing.emit.call_description import model_path
from pipecompile.tracing.node_facts import facts
from pipecompile.tracing.opaque.opaque_module import OpaqueModule
from pipecompile.tracing.traced_graph import TracedGraph
from pipecompile.tracing.user_source import line_of

__all__ = ["Risk", "risks"]

_SHOWN = 4
"""Places in the text of a risk."""


@dataclass(frozen=True, slots=True)
class Risk:
    """One kind of risk: the number of places, the effect, and the places."""

    kind: str
    count: int
    what: str
    places: tuple[str, ...] = ()

    def __str__(self) -> str:
        more = f" and {len(self.places) - _SHOWN} more" if len(self.places) > _SHOWN else ""
        places = f": {', '.join(self.places[:_SHOWN])}{more}" if self.places else ""
        return f"{self.kind} ({self.count}): {self.what}{places}"


def risks(model: nn.Module, graph: TracedGraph | None = None) -> tuple[Risk, ...]:
    """Return the risks of a model, and of its recording if there is one."""
    found = [*_of_model(model), *(() if graph is None else _of_graph(model, graph))]
    return tuple(Risk(kind, len(places), what, tuple(places)) for kind, what, places in found if places)


def _of_model(model: nn.Module) -> Iterator[tuple[str, str, Sequence[str]]]:
    named = [(name or "the model", module) for name, module in model.named_modules()]
    norms = [name for name, module in named if isinstance(module, BatchNorm) and uses_batch_statistics(module)]
    yield "batch statistics", "normalises over a micro-batch, not over the whole batch", norms
    hooked = [name for name, module in named if _hooks(module)]
    yield "hooks", "run once per micro-batch, on its values; while recording they run on fake tensors", hooked
    yield "tied weights", "one parameter under several names: its uses share a device, or are mirrored", _tied(model)


def _of_graph(model: nn.Module, graph: TracedGraph) -> Iterator[tuple[str, str, Sequence[str]]]:
    nodes = compute_nodes(graph)
    drawn = [_place(node) for node in nodes if facts(node).draws and not _idle(node)]
    yield "randomness", "draws numbers once per micro-batch, in the order of the schedule", drawn
    yield "samples that meet", "in micro-batches, only those of the same one", cross_sample_lines(graph)
    unseen = [model_path(str(node.target)) for node in nodes if _is_unseen(graph, node)]
    yield (
        "kept whole",
        "code that is not analysed; in micro-batches, its samples meet only those of the same one",
        unseen,
    )
    owned = {key for node in graph.graph.nodes if node.op == "get_attr" for key in facts(node).storages}
    written = [_place(node) for node in nodes if facts(node).mutates & owned]
    yield "in-place writes", "of buffers or parameters, once per micro-batch", written
    carried = graph.facts.carried.names if graph.facts.carried else ()
    yield "state that a call reads and replaces", "goes from micro-batch to micro-batch", carried
    used = {id(tensor) for node in nodes for tensor in held_tensors(graph, node)}
    unused = [name for name, parameter in model.named_parameters() if id(parameter) not in used]
    yield "unused parameters", "this call does not use them: they get no gradient", unused


def _hooks(module: nn.Module) -> bool:
    return bool(is_hooked(module))


def _tied(model: nn.Module) -> list[str]:
    """Return the names of each parameter that has several, as "a = b"."""
    names = [(id(tensor), name) for name, tensor in model.named_parameters(remove_duplicate=False)]
    count = Counter(key for key, _ in names)
    groups = {key: [name for other, name in names if other == key] for key in count if count[key] > 1}
    return [" = ".join(group) for group in groups.values()]


def _idle(node: fx.Node) -> bool:
    """Return whether a node that may draw does not: it sets the generator's state, or is attention without dropout."""
    rate = node.kwargs.get("dropout_p", node.args[4] if len(node.args) > 4 else 0.0)
    return facts(node).seeds or (node.target is F.scaled_dot_product_attention and not rate)


def _is_unseen(graph: TracedGraph, node: fx.Node) -> bool:
    """Return whether a node is a piece kept whole that takes samples."""
    piece = graph.get_submodule(str(node.target)) if node.op == "call_module" else None
    is_unseen = isinstance(piece, OpaqueModule) and piece.is_users
    return is_unseen and takes_samples(node, graph.facts.symbol)


def _place(node: fx.Node) -> str:
    if node.op == "call_module":
        return model_path(str(node.target))
    return line_of(facts(node).source) or node.name
