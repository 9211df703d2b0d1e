"""The code of a graph with regions of the user's own checkpointing: consecutive nodes of a region become one call.

    nodes                    regions                     code
    a  b  c  d  e            a [b  c] d [e]              a;  b, c = region(a);  d;  e = region(d, c)

A region gets a copy of the model's state that nodes outside of it write. So its recomputation reads the same values as its forward, and not
those that later micro-batches wrote.

The graph itself stays flat, for all analyses: only `forward` of its module is replaced. A region inside a region is a call
inside the code of the outer one. Switches of grad mode and autocast are made anew, from the mode in which a region was called.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Container, Sequence
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import fx

from pipecompile.torch_private.fx_graphs import codegen_of
from pipecompile.tracing.ambient_modes import Ambient
from pipecompile.tracing.emit.node_writer import Regions
from pipecompile.tracing.node_facts import Role, ambient_of, facts, value_of
from pipecompile.tracing.recomputed_region import RecomputedRegion
from pipecompile.tracing.region_call import RegionCall

__all__ = ["install_regions"]

_Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]

_CALLS = ("call_module", "call_function", "call_method")


def install_regions(module: fx.GraphModule, wrap: _Wrap = lambda function: function) -> None:
    """Let `module.forward` run the regions of the module's graph under `torch.utils.checkpoint`. Linear in the nodes and edges.

    `wrap` changes the functions of regions that write tensors of the model.
    """
    nodes = list(module.graph.nodes)
    calls = [node for node in nodes if node.op in _CALLS and facts(node).role is Role.VALUE]
    outside = next(region.outside for node in calls if (region := facts(node).region))
    lasting = _lasting(nodes)
    code = _Code(module, outside, lasting, lasting.intersection(_written(nodes)), wrap)
    for node in nodes:
        if node.op == "placeholder":
            code.fetch(node)
    code.add(calls, 0)
    code.regions.close()
    code.graph.output(fx.map_arg(next(node for node in reversed(nodes) if node.op == "output").args[0], code.fetch))
    code.graph.set_codegen(codegen_of(module.graph))
    type(module).forward = type(fx.GraphModule(module, code.graph, type(module).__name__)).forward


class _Code:
    """A graph with the nodes of a region, or with those outside of all, in which inner regions are calls.

    `lasting` are keys of the memory of the model's tensors, `written` of what the stage writes of it.
    """

    def __init__(
        self, module: fx.GraphModule, outside: Ambient, lasting: frozenset[int], written: frozenset[int], wrap: _Wrap
    ) -> None:
        self.module, self.wrap, self.graph, self.written = module, wrap, fx.Graph(), written
        self.regions = Regions(self.graph, outside)
        self.copies: dict[fx.Node, fx.Node] = {}
        self.lasting = lasting

    def fetch(self, node: fx.Node) -> fx.Node:
        """Return the copy of a node; inputs, attributes and sizes are copied at their first use."""
        if node not in self.copies:
            for source in node.all_input_nodes:
                self.fetch(source)
            self.copies[node] = self.graph.node_copy(node, self.copies.__getitem__)
            self.copies[node].meta = dict(node.meta)
        return self.copies[node]

    def add(self, nodes: Sequence[fx.Node], depth: int) -> None:
        """Append nodes in order; those in a region at this depth as one call."""
        for region, group in groupby(nodes, lambda node: _region_at(node, depth)):
            members = list(group)
            if region is not None:
                self._add_region(region, members, depth)
                continue
            for node in members:
                for source in node.all_input_nodes:
                    self.fetch(source)
                self.regions.enter(ambient_of(node))
                self.fetch(node)

    def _add_region(self, region: RecomputedRegion, members: list[fx.Node], depth: int) -> None:
        own = set(members)
        inputs = list(dict.fromkeys(s for node in members for s in node.all_input_nodes if s not in own))
        outputs = [node for node in members if any(user not in own for user in node.users)]
        part = self._part(region, inputs, members, outputs, depth + 1)
        written = _written(members)
        writes = not self.lasting.isdisjoint(written)
        copied = {source for source in inputs if facts(source).storages & self.written - written}
        call = RegionCall(
            region,
            partial(type(fx.GraphModule(self.module, part, "Region")).forward, self.module),
            frozenset(place for place, one in enumerate(inputs) if one.op == "get_attr" and one not in copied),
            draws=any(facts(node).draws for node in members),
            writes=writes,
            is_plain=_is_plain(members, outputs),
        )
        arguments = self._arguments(inputs, copied, region)
        function = self.wrap(_function(call)) if writes else _function(call)
        results = self.graph.call_function(function, arguments)
        for place, node in enumerate(outputs):
            self.copies[node] = self.graph.call_function(operator.getitem, (results, place))

    def _part(
        self,
        region: RecomputedRegion,
        inputs: Sequence[fx.Node],
        members: Sequence[fx.Node],
        outputs: Sequence[fx.Node],
        depth: int,
    ) -> fx.Graph:
        """Return the graph of a region, a function of its inputs."""
        part = _Code(self.module, region.ambient, self.lasting, self.written, self.wrap)
        for source in inputs:
            part.copies[source] = part.graph.placeholder(source.name)
        part.add(members, depth)
        part.regions.close()
        part.graph.output(tuple(part.copies[node] for node in outputs))
        return part.graph

    def _arguments(
        self, inputs: Sequence[fx.Node], copied: Container[fx.Node], region: RecomputedRegion
    ) -> tuple[fx.Node, ...]:
        """Return the arguments of the call of a region, and enter its modes."""
        given = [self.fetch(source) for source in inputs]
        self.regions.enter(region.ambient)
        pairs = zip(inputs, given, strict=True)
        return tuple(self.graph.call_function(torch.clone, (a,)) if one in copied else a for one, a in pairs)


def _is_plain(members: Sequence[fx.Node], outputs: Sequence[fx.Node]) -> bool:
    """Return whether reentrant autograd can run nodes: they return tensors, and need no graph of their own in a forward without one."""
    needs_graph = any(node.target is torch.autograd.grad for node in members)
    return bool(outputs) and not needs_graph and all(isinstance(value_of(node), torch.Tensor) for node in outputs)


def _written(nodes: Sequence[fx.Node]) -> frozenset[int]:
    return frozenset().union(*(facts(node).mutates for node in nodes))


def _lasting(nodes: Sequence[fx.Node]) -> frozenset[int]:
    held = (facts(node).storages if node.op == "get_attr" else facts(node).reads for node in nodes)
    return frozenset().union(*held)


def _region_at(node: fx.Node, depth: int) -> RecomputedRegion | None:
    region = facts(node).region
    path = region.path if region else ()
    return path[depth] if len(path) > depth else None


def _function(call: RegionCall) -> Callable[..., Any]:
    """Return a call as a function, as fx needs for a node."""

    def recomputed_region(*values: Any) -> Any:
        return call(*values)

    return recomputed_region
