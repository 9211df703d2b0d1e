"""The end of a recording: what the forward returned becomes the outputs, and the graph a GraphModule that knows all about it."""

from __future__ import annotations

import operator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from pipecompile.batching.call_inputs import FlatInputs
from pipecompile.batching.containers import with_shells
from pipecompile.errors import InputError
from pipecompile.torch_private import pytree
from pipecompile.torch_private.fx_graphs import PyTreeCodeGen, PyTreeInfo
from pipecompile.tracing.emit.buffer_writeback import write_back_buffers
from pipecompile.tracing.graph_facts import GraphFacts
from pipecompile.tracing.node_facts import NodeFacts, facts, set_facts, value_of
from pipecompile.tracing.traced_graph import TracedGraph

if TYPE_CHECKING:
    from pipecompile.tracing.recorder import Recorder

__all__ = ["assemble_graph"]


def assemble_graph(recorder: Recorder, inputs: FlatInputs, output: Any) -> TracedGraph:
    """The graph that was recorded, with `output` as its outputs."""
    graph, regions, symbol = recorder.graph, recorder.regions, recorder.symbol
    flat, spec = pytree.tree_flatten(with_shells(output))
    regions.close()
    write_back_buffers(recorder.values, regions.outside)
    result = graph.output(tuple(_result(recorder, leaf) for leaf in flat))
    set_facts(result, NodeFacts(), tuple(flat))
    _drop_unused_items(graph)
    graph.set_codegen(PyTreeCodeGen(PyTreeInfo(list(inputs.arguments), inputs.spec, spec)))
    recorder.opaque_calls.set_conditions()
    noted = GraphFacts(
        guards=symbol.guards(), symbol=symbol.symbol, batch_size=symbol.fixed,
        in_spec=inputs.spec, out_spec=spec, names=inputs.names, dims=inputs.dims,
        outside=regions.outside, device=recorder.twins.device, kept=recorder.opaque_calls.reasons(),
    )  # fmt: skip
    module = TracedGraph(recorder.values.roots, graph, noted, type(recorder.model).__name__)
    module.training = recorder.model.training
    module.register_forward_pre_hook(_check_leaves, with_kwargs=True)
    return module


def _check_leaves(graph: TracedGraph, args: Any, kwargs: Any) -> None:
    """Of a list that is longer, fx itself would take what it knows and say nothing."""
    given, known = len(pytree.tree_leaves(with_shells((args, kwargs)))), graph.facts.in_spec.num_leaves
    if given != known:
        raise InputError(
            f"the graph was recorded with {known} values in its inputs, and is given {given}",
            why="a list of another length, or an argument more or less, is another recording",
            hint="pc.trace with these inputs; pc.compile does so by itself",
        )


def _result(recorder: Recorder, leaf: Any) -> Any:
    """An output leaf; an input or a parameter that is returned as it is gets a node of its own, so a stage makes it."""
    node = recorder.values.result(leaf)
    if not isinstance(leaf, torch.Tensor) or node.op not in ("placeholder", "get_attr"):
        return node
    alias = recorder.graph.call_method("view_as", (node, node))
    set_facts(alias, replace(facts(node), ambient=recorder.regions.outside), value_of(node))
    return alias


def _drop_unused_items(graph: fx.Graph) -> None:
    for node in reversed(graph.nodes):
        scalar = facts(node).is_size
        if not node.users and (node.target is operator.getitem or node.op == "get_attr" or scalar):
            graph.erase_node(node)
