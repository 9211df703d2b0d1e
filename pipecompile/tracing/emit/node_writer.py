"""Append one node per recorded call to a graph: name, arguments, regions, facts, and the bindings of its results."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from pipecompile.tracing.ambient_modes import Ambient
from pipecompile.tracing.emit.ambient_regions import Regions
from pipecompile.tracing.emit.call_description import NodeCall
from pipecompile.tracing.emit.value_nodes import ValueNodes, storages, tensors_in
from pipecompile.tracing.node_facts import NodeFacts, set_facts
from pipecompile.tracing.user_source import caller

__all__ = ["NodeWriter"]


class NodeWriter:
    """Writes the nodes of one recording. `path` is the stack of modules whose forward runs, the innermost last."""

    def __init__(self, values: ValueNodes, regions: Regions) -> None:
        self.values, self.regions = values, regions
        self.path: list[str] = [""]

    def write(
        self,
        call: NodeCall,
        kwargs: Any,
        result: Any,
        ambient: Ambient,
        *,
        changed: Iterable[torch.Tensor] = (),
        exchanged: frozenset[int] = frozenset(),
        held: Iterable[torch.Tensor] = (),
        draws: bool = False,
        seeds: bool = False,
    ) -> fx.Node:
        """Append the node of a call and bind its result.

        `changed` are the tensors that the call writes in place, `exchanged` the memory that the call takes from a tensor,
        `held` the parameters and buffers inside the called module.
        """
        op, target, args = call
        arguments, keywords = self.values.argument(tuple(args)), self.values.argument(dict(kwargs))
        self.regions.enter(ambient)
        node = self.values.graph.create_node(op, target, arguments, keywords, name=self._name(op, target))
        made, written = storages(tensors_in(result)), storages(changed) | exchanged
        noted = NodeFacts(self.path[-1], caller(), ambient, made, written, storages(held), draws, seeds)
        set_facts(node, noted, result)
        self.values.bind_result(result, node)
        return node

    def _name(self, op: str, target: Any) -> str:
        """Return the path of the running module and the word that the call has in the code."""
        word = target if isinstance(target, str) else getattr(target, "__name__", "call")
        prefix = "" if op == "call_module" else self.path[-1]
        return f"{prefix}.{word.strip('_')}".strip(".").replace(".", "_")
