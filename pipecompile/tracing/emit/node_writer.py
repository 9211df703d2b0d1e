"""Append one node per recorded call to a graph: name, arguments, regions, facts, and the bindings of its results.

Regions of grad mode and autocast: nodes set again the state in which each call was recorded.

    recorded                          in the graph
    with torch.no_grad():             before = enabled()
        y = f(x)                      _set_grad_enabled(False)
    z = g(y)                          y = f(x)
                                      _set_grad_enabled(before)
                                      z = g(y)

Settings of kernels (`sdpa_kernel`, `mkldnn.flags`) are set again in the same way. The state is noted on each node, and switches are
emitted again wherever nodes are copied, so regions survive a cut. Outside all regions the state is the caller's.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from pipecompile.errors import RecordingWarning
from pipecompile.torch_private.kernel_settings import kernel_settings, set_kernel_settings
from pipecompile.torch_private.modes import enter_autocast, exit_autocast, set_grad_enabled
from pipecompile.tracing.ambient_modes import Ambient
from pipecompile.tracing.emit.call_description import HOOKS, NodeCall, check_keywords
from pipecompile.tracing.emit.value_nodes import ValueNodes, storages, tensors_in
from pipecompile.tracing.node_facts import NodeFacts, Role, set_facts
from pipecompile.tracing.user_source import caller, warn

__all__ = ["NodeWriter", "Regions"]


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
        check_keywords(kwargs)
        if op == "call_method" and target in HOOKS and self.values.is_owned(args[0]):
            warn(f"{_REGISTERS} ({caller()}); or try n_microbatches=1", RecordingWarning)
        arguments, keywords = self.values.argument(tuple(args)), self.values.argument(dict(kwargs))
        self.regions.enter(ambient)
        node = self.values.graph.create_node(op, target, arguments, keywords, name=self._name(op, target))
        made, written = storages(tensors_in(result)), storages(changed) | exchanged
        noted = NodeFacts(
            self.path[-1], caller(), ambient, made, written, storages(held), draws, seeds, region=self.values.region
        )
        set_facts(node, noted, result)
        self.values.bind_result(result, node)
        return node

    def _name(self, op: str, target: Any) -> str:
        """Return the path of the running module and the word that the call has in the code."""
        word = target if isinstance(target, str) else getattr(target, "__name__", "call")
        prefix = "" if op == "call_module" else self.path[-1]
        return f"{prefix}.{word.strip('_')}".strip(".").replace(".", "_")


_REGISTERS = (
    "forward registers a hook on a parameter, where it stays: at the first backward of a step there are those of all micro-batches, and in a"
    " loop those of the micro-batches so far. Try to register it once, outside of forward"
)

_SWITCH = NodeFacts(role=Role.SWITCH)


_is_grad_enabled = torch.is_grad_enabled  # while a model is recorded, torch has another function under this name


def enabled() -> bool:
    """Return whether gradients are recorded. The name of this function stands in the fingerprints of plans."""
    return _is_grad_enabled()


class Regions:
    """Emits switches into `graph` if the ambient state of the next node differs from that of the last node."""

    def __init__(self, graph: fx.Graph, outside: Ambient) -> None:
        self.graph, self.outside, self.now = graph, outside, outside
        self._open: list[tuple[Ambient, list[fx.Node]]] = []
        self._before: fx.Node | None = None
        self._kernels_before: fx.Node | None = None

    def enter(self, ambient: Ambient) -> None:
        """Call before creating a node that was recorded under `ambient`."""
        if ambient == self.now:
            return
        while self._open and not _inside(ambient, self._open[-1][0]):
            self._leave()
        if ambient.nesting > self._innermost.nesting:
            self._open_autocast(ambient)
        if ambient.grad != self.now.grad:
            self._set_grad(ambient.grad)
        if ambient.kernels_beside(self.outside) != self.now.kernels_beside(self.outside):
            self._set_kernels(ambient)
        self.now = ambient

    def close(self) -> None:
        """Return to the state outside, before the output."""
        self.enter(self.outside)

    @property
    def _innermost(self) -> Ambient:
        return self._open[-1][0] if self._open else self.outside

    def _leave(self) -> None:
        for entered in reversed(self._open.pop()[1]):
            self._switch(exit_autocast, entered)

    def _open_autocast(self, ambient: Ambient) -> None:
        entered = []
        for (kind, dtype, cache), (_, around, _) in zip(ambient.autocast, self._innermost.autocast, strict=True):
            if dtype != around:
                kept = getattr(torch, dtype) if dtype else None
                entered.append(self._switch(enter_autocast, kind, kept, dtype is not None, cache))
        self._open.append((ambient, entered))

    def _set_grad(self, grad: bool) -> None:
        if self._before is None:
            self._before = self._switch(enabled)
        self._switch(set_grad_enabled, self._before if grad == self.outside.grad else grad)

    def _set_kernels(self, ambient: Ambient) -> None:
        if self._kernels_before is None:
            self._kernels_before = self._switch(kernel_settings)
        if self.now.kernels_beside(self.outside):
            self._switch(set_kernel_settings, self._kernels_before)
        if others := ambient.kernels_beside(self.outside):
            self._switch(set_kernel_settings, others)

    def _switch(self, function: object, *args: object) -> fx.Node:
        node = self.graph.call_function(function, args)  # type: ignore[arg-type]
        set_facts(node, _SWITCH, None)
        return node


def _inside(ambient: Ambient, region: Ambient) -> bool:
    """Return whether the state is that of this autocast region or of a region inside it."""
    return ambient.nesting > region.nesting or (ambient.nesting, ambient.autocast) == (region.nesting, region.autocast)
