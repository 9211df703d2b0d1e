"""The report on a recording, for `explain`: counts of nodes, modules and parameters, and the pieces kept whole."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from torch import nn

from pipecompile.text.shown_value import type_text
from pipecompile.torch_private.modules import backward_hooks_of
from pipecompile.tracing.node_facts import facts
from pipecompile.tracing.opaque.hooked_layers import HOOKED
from pipecompile.tracing.opaque.opaque_module import OpaqueModule
from pipecompile.tracing.traced_graph import TracedGraph
from pipecompile.tracing.user_source import line_of

__all__ = ["RecordingReport", "WholeModule", "summarize_recording"]


@dataclass(frozen=True, slots=True)
class WholeModule:
    """A part of the model that is kept whole: one node, although it contains modules or calls.

    `kind` is "layer", "hooked" or "opaque". An opaque part has the code of the failure to record it, and the user's line.
    """

    name: str
    kind: str
    why: str
    code: str = ""
    file: str = ""
    line: int = 0
    function: str = ""
    source: str = ""

    def __str__(self) -> str:
        place = f"\n  {self.file}:{self.line} in {self.function}:  {self.source}" if self.file else ""
        return f"{self.name}: {self.why}{place}"


@dataclass(frozen=True, slots=True)
class RecordingReport:
    """The report on one recording.

    nodes, modules, parameters   numbers of call nodes, of modules with nodes, and of elements of parameters
    layers                       number of torch.nn modules by class, the most frequent first
    batch_size                   the only batch size (samples) that the recording is right for; None if there are several
    regions                      number of regions of the user's own `torch.utils.checkpoint`, without those inside others
    """

    nodes: int
    modules: int
    parameters: int
    layers: dict[str, int]
    kept_whole: tuple[WholeModule, ...]
    guards: tuple[str, ...]
    batch_size: int | None
    regions: int = 0

    @property
    def summary(self) -> str:
        """One line with the counts."""
        counts = f"{self.nodes:,} nodes of {self.modules:,} modules, {self.parameters:,} parameters"
        return f"{counts}, {self.regions} checkpointed region{'s' * (self.regions != 1)}" if self.regions else counts


def summarize_recording(graph: TracedGraph) -> RecordingReport:
    """Return the report on a traced graph."""
    called = {str(n.target): graph.get_submodule(str(n.target)) for n in graph.graph.nodes if n.op == "call_module"}
    inside = {facts(node).module for node in graph.graph.nodes} - {""}
    sizes = {id(p): p.numel() for p in graph.parameters()}
    layers = Counter(type(module).__name__ for module in called.values() if not isinstance(module, OpaqueModule))
    guards = tuple(f"{guard} ({line_of(guard.place)})" if guard.place else str(guard) for guard in graph.facts.guards)
    return RecordingReport(
        nodes=sum(node.op.startswith("call_") for node in graph.graph.nodes),
        modules=len({*called, *inside}),
        parameters=sum(sizes.values()),
        layers=dict(layers.most_common()),
        kept_whole=(*_opaque(graph), *_layers(called)),
        guards=guards,
        batch_size=graph.facts.batch_size,
        regions=len({region.path[0] for node in graph.graph.nodes if (region := facts(node).region)}),
    )


def _opaque(graph: TracedGraph) -> tuple[WholeModule, ...]:
    wholes = []
    for reason in graph.facts.kept:
        fault = reason.fault
        if fault.what == HOOKED:
            wholes.append(WholeModule(reason.piece.text, "hooked", HOOKED))
            continue
        why = f"{fault.code} {fault.what.removeprefix('cannot trace: ')}"
        place = (fault.file, fault.line, fault.function, fault.source)
        wholes.append(WholeModule(reason.piece.text, "opaque", why, fault.code, *place))
    return tuple(wholes)


def _layers(called: dict[str, nn.Module]) -> tuple[WholeModule, ...]:
    wholes = []
    for name, module in called.items():
        if isinstance(module, OpaqueModule):
            continue
        if any(backward_hooks_of(module)):
            wholes.append(WholeModule(name, "hooked", HOOKED))
        elif isinstance(module, (nn.RNNBase, nn.MultiheadAttention)):
            wholes.append(WholeModule(name, "layer", f"{type_text(module)} is one call of torch"))
    return tuple(wholes)
