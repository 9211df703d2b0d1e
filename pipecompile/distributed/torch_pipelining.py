"""The stages of a pipeline as stages of `torch.distributed.pipelining`, to run under the schedules of that package.

    here      stage 1    inputs b, a  ──► module          ──► outputs c, d      by name, each value straight from its producer
    torch     stage 1    f(a, b)      ──► PositionalStage ──► (c, d)            by position, all outputs of the stage before

A positional stage takes the outputs of the stage before it, in their order. It uses the model's own parameters.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage

from pipecompile.distributed.communicator import Communicator
from pipecompile.distributed.tied_copies import TiedCopies
from pipecompile.driver.specialization import Specialization
from pipecompile.errors import PlanError
from pipecompile.ir import HOST
from pipecompile.tracing.node_facts import value_of
from pipecompile.tracing.traced_graph import TracedGraph

__all__ = ["PositionalStage", "torch_stages"]


class PositionalStage(nn.Module):
    """A stage whose inputs are positional. Inputs of the model are positional in the first stage, keywords in the others."""

    def __init__(self, specialization: Specialization, index: int) -> None:
        super().__init__()
        self.stage = specialization.stages[index]
        self.module = self.stage.module
        self.arguments = specialization.inputs if index == 0 else specialization.stages[index - 1].outputs
        self.model_output = specialization.outputs if index == len(specialization.stages) - 1 else None
        self.batch_input = _batch_input(specialization.graph, self.stage.inputs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        values = dict(zip(self.arguments, args, strict=False)) | kwargs
        samples = values[self.batch_input[0]].shape[self.batch_input[1]] if self.batch_input else 0
        inputs = [values[name] for name in self.stage.inputs]
        outputs = self.module(*inputs, samples) if self.stage.sized else self.module(*inputs)
        if self.model_output is None:
            return tuple(value.contiguous() for value in outputs)
        values |= dict(zip(self.stage.outputs, outputs, strict=True))
        return self.model_output.assemble(values.__getitem__, samples)


def torch_stages(specialization: Specialization, communicator: Communicator) -> list[PipelineStage]:
    """Return the stages of this rank. Raises PlanError with all properties of the stages that torch's schedules do not support."""
    faults = [*_faults(specialization)]
    if faults:
        raise PlanError(
            "torch.distributed.pipelining cannot run these stages",
            where="; ".join(faults),
            why="there a stage hands tensors to the next stage alone, and no other stage uses its parameters",
            hint='pipe.step runs them; or move the cut: split_before=, keep_together=, tied="together"',
        )
    ranks, count = communicator.ranks, len(specialization.stages)
    here = [index for index, device in enumerate(specialization.plan.placement) if device == ranks.index]
    return [
        PipelineStage(
            PositionalStage(specialization, index), index, count, specialization.stage_devices[index], group=ranks.group
        )
        for index in here
    ]


def _faults(specialization: Specialization) -> Iterator[str]:
    """Yield a phrase for each property that torch's schedules do not support."""
    last = len(specialization.stages) - 1
    values = {node.name: value_of(node) for node in specialization.graph.graph.nodes if node.op != "output"}
    for route in specialization.routes:
        if route.source == HOST:
            continue
        ends = sorted({last if end == HOST else end for end in route.consumers})
        if ends[-1] > route.source + 1:
            yield f"{route.value} goes from stage {route.source} past its neighbour to stage {ends[-1]}"
        if not isinstance(values[route.value], torch.Tensor):
            yield f"{route.value} between stages {route.source} and {ends[-1]} is not a tensor"
    for stage in specialization.stages:
        if stage.sized and _batch_input(specialization.graph, stage.inputs) is None:
            yield f"no input of stage {stage.index} has the number of samples as a dimension"
    if isinstance(specialization.mirrors, TiedCopies) and (count := len(specialization.mirrors.copies)):
        yield (
            "1 parameter or buffer is used on several ranks"
            if count == 1
            else (f"{count} parameters or buffers are used on several ranks")
        )
    if specialization.options.batch_norm == "deferred":
        yield 'batch_norm="deferred" is settled by pipe.step'


def _batch_input(graph: TracedGraph, names: Sequence[str]) -> tuple[str, int] | None:
    """Return the name of the first value with a dimension of the batch size, and the index of that dimension."""
    symbol, nodes = graph.facts.symbol, {node.name: node for node in graph.graph.nodes}
    for name in names:
        shape = getattr(value_of(nodes[name]), "shape", ())
        for dim, extent in enumerate(shape):
            if isinstance(extent, torch.SymInt) and extent.node.expr == symbol:
                return name, dim
    return None
