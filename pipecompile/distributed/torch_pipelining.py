"""Our stages as those of `torch.distributed.pipelining`, to run under its schedules.

    ours      stage 1    inputs b, a  ──► module ──► outputs c, d      by name, straight from whoever makes them
    theirs    stage 1    f(a, b)      ──► PositionalStage  ──► (c, d)            by position, all that the stage before it made

A piece takes what the stage before it hands on, in its order, and hands on what it makes. It has the model's own parameters.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage

from pipecompile.distributed.tied_copies import TiedCopies
from pipecompile.errors import PlanError
from pipecompile.ir import HOST
from pipecompile.tracing.node_facts import value_of
from pipecompile.tracing.traced_graph import TracedGraph

if TYPE_CHECKING:
    from pipecompile.distributed.rank_pipeline import RankPipeline
    from pipecompile.driver.specialization import Build

__all__ = ["torch_stages"]


class PositionalStage(nn.Module):
    """One stage by position. Inputs of the model come by position to the first stage, by name to any other."""

    def __init__(self, build: Build, index: int) -> None:
        super().__init__()
        self.stage = build.stages[index]
        self.module = self.stage.module
        self.given = build.inputs if index == 0 else build.stages[index - 1].outputs
        self.output = build.outputs if index == len(build.stages) - 1 else None
        self.sized = _with_batch(build.graph, self.stage.inputs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        values = dict(zip(self.given, args, strict=False)) | kwargs
        size = values[self.sized[0]].shape[self.sized[1]] if self.sized else 0
        taken = [values[name] for name in self.stage.inputs]
        made = self.module(*taken, size) if self.stage.sized else self.module(*taken)
        if self.output is None:
            return tuple(value.contiguous() for value in made)
        values |= dict(zip(self.stage.outputs, made, strict=True))
        return self.output.assemble(values.__getitem__, size)


def torch_stages(pipe: RankPipeline) -> list[PipelineStage]:
    """The stages of this rank. Raises PlanError with everything about them that its schedules cannot do."""
    build = pipe.builds.latest
    faults = [*_faults(build)]
    if faults:
        raise PlanError(
            "torch.distributed.pipelining cannot run these stages",
            where="; ".join(faults),
            why="there a stage hands tensors to the next one alone, and has its parameters for itself",
            hint='pipe.step runs them; or move the cut: split_before=, keep_together=, tied="together"',
        )
    here = [index for index, device in enumerate(build.plan.placement) if device == pipe.ranks.index]
    return [
        PipelineStage(
            PositionalStage(build, index), index, len(build.stages), build.stage_devices[index], group=pipe.ranks.group
        )
        for index in here
    ]


def _faults(build: Build) -> Iterator[str]:
    last, values = (
        len(build.stages) - 1,
        {node.name: value_of(node) for node in build.graph.graph.nodes if node.op != "output"},
    )
    for route in build.routes:
        ends = sorted({last if end == HOST else end for end in route.consumers})
        if route.source == HOST:
            continue
        if beyond := [end for end in ends if end > route.source + 1]:
            yield f"{route.value} goes from stage {route.source} past its neighbour to stage {beyond[-1]}"
        if not isinstance(values[route.value], torch.Tensor):
            yield f"{route.value} between stages {route.source} and {ends[-1]} is no tensor"
    for stage in build.stages:
        if stage.sized and _with_batch(build.graph, stage.inputs) is None:
            yield f"nothing that stage {stage.index} takes says how many samples there are"
    if isinstance(build.mirrors, TiedCopies) and build.mirrors.copies:
        yield f"{len(build.mirrors.copies)} parameters or buffers are used on several ranks"
    if build.options.batch_norm == "deferred":
        yield 'batch_norm="deferred" is settled by pipe.step'


def _with_batch(graph: TracedGraph, names: Sequence[str]) -> tuple[str, int] | None:
    """The first of these values with a dimension that is the batch, and which."""
    symbol, nodes = graph.facts.symbol, {node.name: node for node in graph.graph.nodes}
    for name in names:
        shape = getattr(value_of(nodes[name]), "shape", ())
        for dim, extent in enumerate(shape):
            if isinstance(extent, torch.SymInt) and extent.node.expr == symbol:
                return name, dim
    return None
