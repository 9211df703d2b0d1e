"""Stages: the traced graph cut into one GraphModule per stage, with named ports and a route for every value.

      traced graph            stage 0                 stage 1
      x ─► a ─► b ─► c        in: x   out: a, b       in: a, b   out: c        a: 0 ► 1   b: 0 ► 1   c: 1 ► host
           └─────────┘

A value goes from the stage that produces it directly to each stage that uses it. Sizes are not sent: each stage computes
them from the batch size of its micro-batch. Parameters and submodules of a stage are the model's own objects. A region of the
user's own `torch.utils.checkpoint` that a cut divides becomes one region per stage. A stage that writes into the memory of a value
that it receives writes into a copy.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import sympy
import torch
from torch import fx

from pipecompile.graph.colocation import compute_nodes
from pipecompile.graph.device_placement import follow_device
from pipecompile.graph.region_parts import RegionParts
from pipecompile.ir import HOST, Route
from pipecompile.tracing.emit.node_writer import Regions
from pipecompile.tracing.emit.region_graphs import install_regions
from pipecompile.tracing.node_facts import Role, ambient_of, facts, has_regions, note, value_of
from pipecompile.tracing.traced_graph import TracedGraph, check_code_names

__all__ = ["Stage", "extract", "route_of", "routes", "split"]


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage: `module(*inputs)` returns the tuple of `outputs`; with `sized`, the number of samples is one more argument."""

    index: int
    module: fx.GraphModule
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    sized: bool
    nodes: tuple[str, ...]


def routes(
    graph: TracedGraph,
    stage_of: Mapping[str, int],
    samples: int | None = None,
    outputs: Collection[fx.Node] | None = None,
) -> tuple[Route, ...]:
    """Return a route for each value that a stage uses and does not produce, and for each output, in graph order.

    `nbytes` is the size in bytes for `samples` samples, by default as many as were recorded. Nodes without an entry in `stage_of`
    do not count; `outputs` are by default those of the graph.
    """
    wanted: defaultdict[fx.Node, set[int]] = defaultdict(set)
    for node in compute_nodes(graph):
        for used in node.all_input_nodes if node.name in stage_of else ():
            wanted[used].add(stage_of[node.name])
    found, constants = [], _without_gradient(graph)
    outputs = set(graph.graph.output_node().all_input_nodes) if outputs is None else outputs
    for node in graph.graph.nodes:
        source: int | None = HOST if node.op == "placeholder" else stage_of.get(node.name)
        if source is None:
            continue
        consumers = sorted(wanted[node] - {source}) + [HOST] * (node in outputs and source != HOST)
        if consumers:
            route = route_of(node, source, consumers, {graph.facts.symbol: samples} if samples else {})
            found.append(replace(route, gradient=False) if node in constants else route)
    return tuple(found)


def _without_gradient(graph: TracedGraph) -> set[fx.Node]:
    """Return the values that no parameter, buffer or input with a gradient goes into, whatever the weights: masks, positions, inputs.

    Only of a graph recorded with gradients on; the signature of a call has the `requires_grad` of its inputs. Values that are written in
    place, calls of modules, and graphs with parts that were not recorded count as differentiable.
    """
    if not graph.facts.outside.grad or graph.facts.kept or has_regions(graph.graph.nodes):
        return set()
    written = frozenset[int]().union(*(facts(node).mutates for node in graph.graph.nodes))
    constants: set[fx.Node] = set()
    for node in graph.graph.nodes:
        value = value_of(node)
        is_plain = node.op in ("placeholder", "call_function", "call_method") and not facts(node).storages & written
        is_constant = isinstance(value, torch.Tensor) and not value.requires_grad and is_plain
        if is_constant and all(source in constants or facts(source).is_size for source in node.all_input_nodes):
            constants.add(node)
    return constants


def route_of(node: fx.Node, source: int, consumers: Sequence[int], sizes: Mapping[sympy.Symbol, int]) -> Route:
    """Return the route of a value, for these sizes in samples; those that are not in `sizes` are as they were recorded."""
    value = value_of(node)
    if not isinstance(value, torch.Tensor):
        return Route(node.name, source, tuple(consumers), 0.0, gradient=False)
    differentiable = value.dtype.is_floating_point or value.dtype.is_complex
    nbytes = float(value.element_size() * _elements(value, sizes))
    return Route(node.name, source, tuple(consumers), nbytes, differentiable)


def _elements(value: torch.Tensor, sizes: Mapping[sympy.Symbol, int]) -> int:
    """Return the number of elements with `sizes` for symbols; sizes that the data decide are those of the example."""
    count = value.numel()
    if not isinstance(count, torch.SymInt):
        return count
    known = sympy.sympify(count.node.expr.xreplace(dict(sizes)))  # of a symbol alone it makes a plain int
    return int(known) if known.is_number else count.node.hint


def split(
    graph: TracedGraph, plan_routes: Sequence[Route], stage_of: Mapping[str, int], devices: Sequence[torch.device]
) -> tuple[Stage, ...]:
    """Return one stage per entry of `devices`, the device of each stage. The traced graph does not change.

    Nodes without an entry in `stage_of` are left out.
    """
    members: list[list[fx.Node]] = [[] for _ in devices]
    for node in compute_nodes(graph):
        if node.name in stage_of:
            members[stage_of[node.name]].append(node)
    return tuple(
        _Builder(graph, index, nodes, plan_routes).build(devices[index]) for index, nodes in enumerate(members)
    )


def extract(
    graph: TracedGraph,
    nodes: list[fx.Node],
    inputs: Sequence[fx.Node],
    outputs: Sequence[fx.Node],
    device: torch.device,
) -> Stage:
    """Return some nodes of a graph as a stage of its own on `device`, from the values of `inputs` to those of `outputs`."""
    arriving = [Route(node.name, HOST, (0,)) for node in inputs]
    leaving = [Route(node.name, 0, (HOST,)) for node in outputs]
    return _Builder(graph, 0, nodes, (*arriving, *leaving)).build(device)


class _StageModule(fx.GraphModule):
    """The module of a stage, whose code runs the user's own checkpointed regions under `torch.utils.checkpoint`."""

    def recompile(self) -> Any:
        check_code_names(self.graph)
        code = super().recompile()
        if has_regions(self.graph.nodes):
            install_regions(self)
        return code


class _Builder:
    """Copies the nodes of one stage into a graph of its own."""

    def __init__(self, source: TracedGraph, index: int, nodes: list[fx.Node], plan_routes: Sequence[Route]) -> None:
        self.source, self.index, self.nodes = source, index, nodes
        self.inputs = tuple(route.value for route in plan_routes if index in route.consumers)
        self.outputs = tuple(route.value for route in plan_routes if route.source == index)
        self.graph = fx.Graph()
        self.regions = Regions(self.graph, source.facts.outside)
        self.copies: dict[fx.Node, fx.Node] = {}
        self.size: fx.Node | None = None
        self.written = {storage for node in nodes for storage in facts(node).mutates}

    def build(self, device: torch.device) -> Stage:
        named = {node.name: node for node in self.source.graph.nodes}
        for name in self.inputs:
            self.copies[named[name]] = self._copy(named[name], self.graph.placeholder(name))
        if any(facts(source).is_size for node in self.nodes for source in node.all_input_nodes):
            self.size = self.graph.placeholder("batch_size")
        for name in self.inputs:
            self._own(named[name])
        for node in self.nodes:
            for source in node.all_input_nodes:
                self._fetch(source)
            self.regions.enter(ambient_of(node))
            self._fetch(node)
        self.regions.close()
        if has_regions(self.nodes):
            self._note_parts([self.copies[named[name]] for name in self.inputs])
        self.graph.output(tuple(self.copies[named[name]] for name in self.outputs))
        follow_device(self.graph, self.source.facts.device, device).lint()
        module = _StageModule(self.source, self.graph, f"Stage{self.index}")
        module.training = self.source.training
        return Stage(
            self.index, module, self.inputs, self.outputs, self.size is not None, tuple(n.name for n in self.nodes)
        )

    def _own(self, node: fx.Node) -> None:
        """Let the stage use a copy of a received value whose memory the stage writes. An input of the model is the caller's to write."""
        if node.op != "placeholder" and self.written & facts(node).storages:
            received = self.copies[node]
            self.copies[node] = self._copy(node, self.graph.call_function(torch.clone, (received,)))
            note(received, storages=frozenset())
            note(self.copies[node], region=None)

    def _note_parts(self, received: Sequence[fx.Node]) -> None:
        """Note the parts of regions. A copy of a received value is made in the part that writes it: the part is run again."""
        parts = RegionParts(self.source.graph.nodes, self.nodes)
        for node in self.nodes:
            if region := facts(node).region:
                note(self.copies[node], region=parts.part(region))
        order = {node: place for place, node in enumerate(self.graph.nodes)}
        for copy in received:
            if copy.op != "placeholder" and copy.users:
                first = min(copy.users, key=order.__getitem__)
                first.prepend(copy)
                note(copy, region=facts(first).region)

    def _fetch(self, node: fx.Node) -> fx.Node:
        """Return the copy of a node in this stage; attributes and sizes are copied at their first use."""
        if node not in self.copies:
            if facts(node).role is Role.BATCH_SIZE:
                assert self.size is not None
                self.copies[node] = self.size
            else:
                self.copies[node] = self._copy(node, self.graph.node_copy(node, self._fetch))
        return self.copies[node]

    @staticmethod
    def _copy(node: fx.Node, copy: fx.Node) -> fx.Node:
        copy.meta = dict(node.meta)
        return copy
