"""The end of a recording: what the forward returned becomes the output node, and the graph a TracedGraph with its facts.

A buffer that `forward` replaces is written back: the graph writes the new value into the tensor that the model owns. So is other
state that calls carry on (`state/carried_state`).

    mean = get_attr(mean)            mean = get_attr(mean)
    new = f(mean)            ──►     before = mean.clone()         autograd may have saved the old value
                                     new = f(before)
                                     mean.copy_(new.detach())

A buffer that is replaced by a tensor of another shape or dtype, or by None, is state that the call leaves (`state/leftover_state`).
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import fx, nn

from pipecompile.batching.call_inputs import FlatInputs
from pipecompile.batching.containers import with_shells
from pipecompile.errors import InputError
from pipecompile.torch_private import pytree
from pipecompile.torch_private.fx_graphs import PyTreeCodeGen, PyTreeInfo
from pipecompile.torch_private.modules import buffers_of
from pipecompile.tracing.ambient_modes import Ambient
from pipecompile.tracing.emit.node_writer import Regions
from pipecompile.tracing.emit.value_nodes import ValueNodes, storages
from pipecompile.tracing.emit.written_back import is_written_back
from pipecompile.tracing.fakes.batch_symbol import BatchSymbol
from pipecompile.tracing.fakes.fake_tensors import Twins
from pipecompile.tracing.graph_facts import GraphFacts
from pipecompile.tracing.node_facts import NodeFacts, facts, note, set_facts, value_of
from pipecompile.tracing.opaque.opaque_calls import OpaqueCalls
from pipecompile.tracing.state.layer_writes import LayerWrites
from pipecompile.tracing.state.recording_leftovers import RecordingLeftovers
from pipecompile.tracing.traced_graph import TracedGraph

__all__ = ["RecordedForward", "assemble_graph", "write_back"]


class RecordedForward(Protocol):
    """The recorder after the forward, as far as the graph needs it."""

    model: nn.Module
    values: ValueNodes
    regions: Regions
    symbol: BatchSymbol
    twins: Twins
    opaque_calls: OpaqueCalls
    layer_writes: LayerWrites
    leftovers: RecordingLeftovers


def assemble_graph(recording: RecordedForward, inputs: FlatInputs, output: Any) -> TracedGraph:
    """Return the recorded graph with `output` as its output."""
    values, regions, symbol = recording.values, recording.regions, recording.symbol
    graph = values.graph
    flat, spec = pytree.tree_flatten(with_shells(output))
    regions.close()
    rebound = write_back(values, recording.opaque_calls.opaque.carried.pairs, regions.outside)
    result = graph.output(tuple(_output_argument(recording, leaf) for leaf in flat))
    set_facts(result, NodeFacts(), tuple(flat))
    _drop_unused_items(graph)
    graph.set_codegen(PyTreeCodeGen(PyTreeInfo(list(inputs.arguments), inputs.spec, spec)))
    recording.opaque_calls.finish(graph.nodes, values)
    noted = GraphFacts(
        guards=symbol.guards(), symbol=symbol.symbol, batch_size=symbol.fixed,
        in_spec=inputs.spec, out_spec=spec, names=inputs.names, dims=inputs.dims,
        outside=regions.outside, device=recording.twins.device, kept=recording.opaque_calls.reasons(),
        rebound=_names(recording.model, rebound), carried=recording.opaque_calls.opaque.carried.facts(),
        written=frozenset(recording.layer_writes.names) | _written_by_pieces(recording),
        left=recording.leftovers.left_names,
    )  # fmt: skip
    module = TracedGraph(values.roots, graph, noted, type(recording.model).__name__)
    module.training = recording.model.training
    module.register_forward_pre_hook(_check_leaf_count, with_kwargs=True)
    return module


def _check_leaf_count(graph: TracedGraph, args: Any, kwargs: Any) -> None:
    """Raise InputError for inputs with another number of leaves: fx would drop the rest of a longer list in silence."""
    count, expected = len(pytree.tree_leaves(with_shells((args, kwargs)))), graph.facts.in_spec.num_leaves
    if count != expected:
        raise InputError(
            f"the graph was recorded with {expected} value{'s' * (expected != 1)} in its inputs, and the call has {count}",
            why="a list of another length, or an argument more or less, is another recording",
            hint="pc.trace with these inputs; pc.compile does so by itself",
        )


def _output_argument(recording: RecordedForward, leaf: Any) -> Any:
    """Return the node of an output leaf.

    An input or parameter that is returned unchanged gets a node of its own, so that a stage produces the output.
    """
    node = recording.values.result(leaf)
    if not isinstance(leaf, torch.Tensor) or node.op not in ("placeholder", "get_attr"):
        return node
    alias = recording.values.graph.call_method("view_as", (node, node))
    set_facts(alias, replace(facts(node), ambient=recording.regions.outside), value_of(node))
    return alias


def _drop_unused_items(graph: fx.Graph) -> None:
    """Erase items of tuples, attributes and sizes without users."""
    for node in reversed(graph.nodes):
        is_size = facts(node).is_size
        if not node.users and (node.target is operator.getitem or node.op == "get_attr" or is_size):
            graph.erase_node(node)


def write_back(
    values: ValueNodes, carried: Sequence[tuple[torch.Tensor, torch.Tensor]], ambient: Ambient
) -> set[tuple[int, str]]:
    """Append the writes to the graph, outside of all regions. The fake tensors are still in the model's tables.

    `carried` has (tensor before, new tensor) of what the call replaces elsewhere. All new values are read before the first write: one
    may be what another held before. Return (id of the module, name) of each buffer that is written.
    """
    replaced = [*_replaced(values)]
    pairs = [(twin, new) for _, _, twin, new in replaced] + [*carried]
    nodes = [(values.node(before), _call("detach", values.node(new), ambient)) for before, new in pairs]
    for attribute, detached in nodes:
        if attribute.users:
            _read_a_copy(attribute, ambient)
        note(_call("copy_", attribute, ambient, detached), mutates=storages([value_of(attribute)]))
    return {(id(module), key) for module, key, _, _ in replaced}


def _written_by_pieces(recording: RecordedForward) -> set[str]:
    """Return the names of the tensors that trial runs of pieces kept whole have written."""
    written = {id(one) for piece in recording.opaque_calls.modules.values() for one in piece.changed}
    return {name for name, tensor, _ in recording.values.owned() if id(tensor) in written}


def _names(model: nn.Module, buffers: set[tuple[int, str]]) -> tuple[str, ...]:
    """Return the names of buffers, each by the first path to its module."""
    paths = {id(module): path for path, module in model.named_modules()}
    return tuple(sorted(f"{paths[module]}.{key}".lstrip(".") for module, key in buffers if module in paths))


def _replaced(values: ValueNodes) -> Iterator[tuple[nn.Module, str, torch.Tensor, torch.Tensor]]:
    for module, key, twin in values.buffers:
        new = buffers_of(module).get(key)
        if new is not None and new is not twin and is_written_back(twin, new):
            yield module, key, twin, new


def _read_a_copy(attribute: fx.Node, ambient: Ambient) -> None:
    with attribute.graph.inserting_after(attribute):
        copy = _call("clone", attribute, ambient)
    attribute.replace_all_uses_with(copy, delete_user_cb=lambda user: user is not copy)


def _call(method: str, node: fx.Node, ambient: Ambient, *args: fx.Node) -> fx.Node:
    call = node.graph.call_method(method, (node, *args))
    set_facts(call, replace(facts(node), ambient=ambient, mutates=frozenset()), value_of(node))
    return call
