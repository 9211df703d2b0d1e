"""Graph pass: nodes that must share a stage because they share memory, and nodes that must not come after a write.

    y = bn(x)         one group {bn, relu_}: relu_ writes y's memory, and a write never crosses a cut
    z = conv(y)  ──►  conv reads before the write: stage(conv) <= stage(relu_)
    relu_(y)

With a copy at the cut, bn and relu_ may be in two stages if y is the only way to its memory from relu_ on: the stage of relu_ writes
a copy of the y that it received. `ties_with_copies` has the ties that are left then.

Storages and writes come from the recording (NodeFacts), so this module has no list of in-place operators.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise

import networkx as nx
import torch
from torch import fx, nn
from torch.distributed.tensor import DTensor

from pipecompile.graph.gradient_paths import differentiated, reached, reaching
from pipecompile.graph.left_branches import anchored_branches
from pipecompile.graph.left_reads import tie_left_reads
from pipecompile.graph.region_parts import tie_lone_writes
from pipecompile.graph.tensor_settings import changed_tensors, tie_flags
from pipecompile.tracing.emit.call_objects import remade
from pipecompile.tracing.emit.closures import rebuilt
from pipecompile.tracing.graph_facts import Ties
from pipecompile.tracing.graph_text import ModuleStub
from pipecompile.tracing.node_facts import Role, facts, value_of
from pipecompile.tracing.opaque.opaque_module import OpaqueModule
from pipecompile.tracing.qualified_names import qualified
from pipecompile.tracing.traced_graph import TracedGraph

__all__ = [
    "compute_nodes",
    "compute_ties",
    "note_ties",
    "reasons_of_ties",
    "ties_of",
    "ties_with_copies",
]


def note_ties(graph: TracedGraph) -> TracedGraph:
    """Note the ties of the graph in its facts, and return the graph."""
    graph.facts = replace(graph.facts, ties=compute_ties(graph))
    return graph


def ties_of(graph: TracedGraph) -> Ties:
    """Return the ties noted in a graph; compute them for a graph that is not prepared."""
    return graph.facts.ties or compute_ties(graph)


def compute_nodes(graph: fx.GraphModule) -> list[fx.Node]:
    """Return the nodes that have a stage, in graph order: no inputs, attributes, sizes, mode switches or output."""
    called = ("call_module", "call_function", "call_method")
    return [n for n in graph.graph.nodes if n.op in called and facts(n).role is Role.VALUE]


def compute_ties(graph: fx.GraphModule) -> Ties:
    """Return the ties of tuples and their items, of modules with state called twice, of `autograd.grad`, random states and memory
    written.
    """
    ties, precedence, _ = _tied(graph, copies=False)
    return Ties(_groups(graph, ties), tuple(dict.fromkeys(precedence)))


def ties_with_copies(graph: fx.GraphModule) -> tuple[Ties, tuple[tuple[str, str], ...]]:
    """Return the ties that remain if stages may write copies of what they receive, and the pairs (value, writer) that need
    a copy where a cut separates the two.
    """
    ties, precedence, copied = _tied(graph, copies=True)
    return Ties(_groups(graph, ties), tuple(dict.fromkeys(precedence))), tuple(dict.fromkeys(copied))


def reasons_of_ties(graph: fx.GraphModule) -> nx.Graph[str]:
    """Return the ties that remain with copies as a graph of node names; the attribute `why` of an edge is its reason."""
    return _tied(graph, copies=True)[0]


def _tied(graph: fx.GraphModule, *, copies: bool) -> tuple[nx.Graph[str], list[tuple[str, str]], list[tuple[str, str]]]:
    """Return the ties as a graph, the pairs (a, b) with stage(a) <= stage(b), and the pairs (value, writer) of copies."""
    nodes = compute_nodes(graph)
    ties: nx.Graph[str] = nx.Graph()
    _tie_items(nodes, ties)
    _tie_stateful_modules(graph, nodes, ties)
    _tie_gradients(nodes, ties)
    _tie_kept_gradients(nodes, ties)
    _tie_left_values(graph, nodes, ties)
    tie_flags(graph, nodes, ties)
    tie_lone_writes(nodes, ties)
    tie_left_reads(graph, nodes, ties)
    copied: list[tuple[str, str]] = []
    writes = _tie_writes(graph, nodes, ties, copied if copies else None)
    return ties, [*writes, *_tie_draws(nodes, ties)], copied


def _groups(graph: fx.GraphModule, ties: nx.Graph[str]) -> tuple[tuple[str, ...], ...]:
    """Return the tied nodes in graph order."""
    order = {node.name: index for index, node in enumerate(compute_nodes(graph))}
    groups = [tuple(sorted(group, key=order.__getitem__)) for group in nx.connected_components(ties)]
    return tuple(sorted(groups, key=lambda group: order[group[0]]))


def _tie(ties: nx.Graph[str], nodes: Iterable[fx.Node], why: str) -> None:
    nx.add_path(ties, [node.name for node in nodes], why=why)


def _place(node: fx.Node) -> str:
    """Return a node with the user's line."""
    return f"{node.name} ({facts(node).source})" if facts(node).source else node.name


def _tie_items(nodes: list[fx.Node], ties: nx.Graph[str]) -> None:
    """Tie each node to the sources that are not plain tensors, since only those cross a cut.

    An item stays with its tuple, list, dict or object, and the user of a size that the data decide with the node that reads the size. A
    DTensor is of a mesh whose ranks are those of its own stage.
    """
    made = set(nodes)
    for node in nodes:
        for source in (one for one in node.all_input_nodes if one in made):
            value = value_of(source)
            if isinstance(value, DTensor) or not isinstance(value, torch.Tensor):
                kind = "a DTensor" if isinstance(value, DTensor) else "no tensor"
                why = f"{node.name} uses {source.name}, which is {kind}, and only plain tensors are sent"
                _tie(ties, (source, node), why)


def _tie_stateful_modules(graph: fx.GraphModule, nodes: list[fx.Node], ties: nx.Graph[str]) -> None:
    uses: defaultdict[nn.Module, list[fx.Node]] = defaultdict(list)
    for node in nodes:
        if node.op == "call_module":
            uses[graph.get_submodule(str(node.target))].append(node)
    for module, users in uses.items():
        if len(users) > 1 and (_is_opaque(module) or next(module.buffers(), None) is not None):
            _tie(ties, users, f"they call one layer with state, {users[0].target}")


def _is_opaque(module: nn.Module) -> bool:
    """Return whether the module is an opaque piece of the model, or the stub of one in a parsed graph."""
    return isinstance(module, OpaqueModule) or (
        isinstance(module, ModuleStub) and module.kind == qualified(OpaqueModule)
    )


def _tie_gradients(nodes: list[fx.Node], ties: nx.Graph[str]) -> None:
    """Tie all nodes between the inputs and outputs of `autograd.grad(outputs, inputs)`: autograd needs their graph in one piece.

    A function that closes over tensors may call `autograd.grad` on them.
    """
    for i, node in enumerate(nodes):
        if node.target is torch.autograd.grad:
            _tie(ties, differentiated(node, nodes[: i + 1]), f"{_place(node)} differentiates what lies between")
        elif node.target in (rebuilt, remade):
            held = set(node.all_input_nodes)
            inside = reached(held, nodes[:i]) & reaching(held, nodes[:i])
            path = [*(other for other in nodes[:i] if other in inside), node] if inside - held else []
            _tie(ties, path, f"{_place(node)} closes over their tensors and may differentiate them")


def _tie_kept_gradients(nodes: list[fx.Node], ties: nx.Graph[str]) -> None:
    """Tie `h.retain_grad()` to what leaves h on the model: another stage would leave a tensor that gets a part of the gradient."""
    for node in nodes:
        if node.op == "call_method" and node.target == "retain_grad":
            value = value_of(node.all_input_nodes[0])
            same = [one for one in nodes if value_of(one) is value]  # also what operations in place return
            leaving = [user for one in same for user in one.users if value_of(user) is None and user is not node]
            _tie(ties, [*same, node, *leaving], f"{_place(node)} keeps the gradient")


def _tie_left_values(graph: fx.GraphModule, nodes: list[fx.Node], ties: nx.Graph[str]) -> None:
    """Tie what leaves a tensor on the model to the operation that makes the tensor: another stage would leave a copy without its graph.
    Tie the branches that lead to nothing else to where they begin.
    """
    made = set(nodes)
    for node in nodes:
        if hasattr(node.target, "place") and len(sources := made.intersection(node.all_input_nodes)) == 1:
            _tie(ties, (*sources, node), f"{_place(node)} leaves the tensor on the model")
    for branch in anchored_branches(graph, nodes):
        _tie(ties, branch, f"{_place(branch[-1])} leaves a tensor on the model, and they lead to nothing else")


def _tie_draws(nodes: list[fx.Node], ties: nx.Graph[str]) -> list[tuple[str, str]]:
    """Return the pairs that keep random draws in the order of the model; tie all draws if a node sets the generator's state."""
    drawing = [node for node in nodes if facts(node).draws]
    if any(facts(node).seeds for node in drawing):
        _tie(ties, drawing, "they draw random numbers, and one of them sets the state of the generator")
    return [(a.name, b.name) for a, b in pairwise(drawing)]


def _tie_writes(
    graph: fx.GraphModule, nodes: list[fx.Node], ties: nx.Graph[str], copied: list[tuple[str, str]] | None = None
) -> list[tuple[str, str]]:
    """Tie the nodes that make or write the same memory, and return pairs (reader, writer) for reads before the last write.

    Parameters, buffers and constants outlive the micro-batch, and the next micro-batch may write them again while a later stage
    still reads: all their readers are tied to the writer. So are the readers of an input that a node writes. With `copied`,
    other memory is tied as `_tie_with_copies` says, unless a call changes its tensor itself, as hooks do.
    """
    last_write = {storage: i for i, node in enumerate(nodes) for storage in facts(node).mutates}
    outside = [node for node in graph.graph.nodes if node.op in ("get_attr", "placeholder")]
    lasting = {storage for node in outside if node.op == "get_attr" for storage in facts(node).storages}
    lasting |= {storage for node in nodes for storage in facts(node).reads}
    fixed = lasting | changed_tensors(nodes) | {storage for node in outside for storage in facts(node).storages}
    tied: defaultdict[int, list[fx.Node]] = defaultdict(list)
    touching: defaultdict[int, list[fx.Node]] = defaultdict(list)
    precedence = []
    for i, node in enumerate(nodes):
        read = {(storage, source.op) for source in node.all_input_nodes for storage in facts(source).storages}
        read |= {(storage, "get_attr") for storage in facts(node).reads}
        touched = {*facts(node).storages, *facts(node).mutates, *(storage for storage, _ in read)}
        for storage in sorted(touched & last_write.keys()):
            owns = storage in facts(node).mutates or (storage in facts(node).storages and i <= last_write[storage])
            if copied is not None and storage not in fixed:
                touching[storage].append(node)
            elif owns or storage in lasting or (storage, "placeholder") in read:
                tied[storage].append(node)
            elif i < last_write[storage]:
                precedence.append((node.name, nodes[last_write[storage]].name))
    for storage, group in tied.items():
        _tie(ties, group, f"{_place(nodes[last_write[storage]])} writes into their memory")
    for storage, group in touching.items():
        precedence += _tie_with_copies(graph, group, storage, ties, copied if copied is not None else [])
    return precedence


def _tie_with_copies(
    graph: fx.GraphModule, touching: list[fx.Node], storage: int, ties: nx.Graph[str], copied: list[tuple[str, str]]
) -> list[tuple[str, str]]:
    """Tie the nodes that touch one memory between two writes, and return pairs (reader, next writer).

        y = linear(x) │ relu_(y) ─► z        │ a cut is possible: from relu_ on, only y leads to the memory that linear made

    A write begins a new part if a single tensor leads to the memory that is made so far, from the write on, and no output of the
    graph does. Its stage may then write a copy of that tensor. Every later user of the tensor reads what was written, and stays
    with the writer. Pairs (tensor, writer) are added to `copied`. Linear in the uses of the memory.
    """
    outputs, order = set(graph.graph.output_node().all_input_nodes), {node: i for i, node in enumerate(touching)}
    last_use = {node: max((order.get(user, -1) for user in node.users), default=-1) for node in touching}
    last_write = max(i for i, node in enumerate(touching) if storage in facts(node).mutates)
    part, readers, alive, precedence, why = *([] for _ in range(4)), ""  # type: ignore[var-annotated]
    for i, node in enumerate(touching):
        if is_writer := storage in facts(node).mutates:
            why_before, why = (
                why or f"{_place(node)} writes into their memory",
                f"{_place(node)} writes into their memory",
            )
            precedence += [(reader.name, node.name) for reader in readers]
            alive, readers = [other for other in alive if last_use[other] >= i or other in outputs], []
            if len(alive) == 1 and alive[0] not in outputs and _can_be_copied(alive[0], storage):
                _tie(ties, part, why_before)
                copied.append((alive[0].name, node.name))
                part = [user for user in alive[0].users if order.get(user, -1) > i]
        is_owner = is_writer or (storage in facts(node).storages and i <= last_write)
        (part if is_owner else readers).append(node)
        if storage in facts(node).storages:
            alive.append(node)
    _tie(ties, part, why)
    return precedence


def _can_be_copied(node: fx.Node, storage: int) -> bool:
    """Return whether the node's value is a plain tensor in this memory alone."""
    value = value_of(node)
    return isinstance(value, torch.Tensor) and value.layout is torch.strided and facts(node).storages == {storage}
