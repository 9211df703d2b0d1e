"""The backend of a pipeline: the decisions that one process and the ranks of torch.distributed take differently.

The phases of a compilation are the same for both. They ask the backend where parameters live, which process plans for all, and
what runs a program. `Backend` is that of one process, `distributed/rank_backend.py` has that of a rank.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

from pipecompile.batching.microbatches import Weights
from pipecompile.errors import PipecompileError
from pipecompile.graph.stages import Stage
from pipecompile.ir.plan import Plan
from pipecompile.options import Options
from pipecompile.parameters.placement import Homes, place_stages
from pipecompile.parameters.tied_mirrors import Mirrors
from pipecompile.planning.planner import Planned
from pipecompile.runtime.cells.deferred_batchnorm import DeferredNorms
from pipecompile.runtime.executable import Executable
from pipecompile.tracing.guards.state_guards import ReadChange
from pipecompile.tracing.traced_graph import TracedGraph

__all__ = ["Backend"]


class Backend:
    """The decisions of a pipeline whose devices are all in this process. A subclass takes others."""

    holds_model = True
    """Whether all parameters of the model are in this process."""

    has_copies = False
    """Whether there are several copies of the pipeline, each with its part of the batch."""

    overlaps = False
    """Whether values go between processes beside compute, on streams of their own."""

    @property
    def is_planner(self) -> bool:
        """Whether this process measures and cuts. Exactly one process of a pipeline does."""
        return True

    def without_collectives(self, model: nn.Module, options: Options) -> AbstractContextManager[None]:  # noqa: ARG002
        """Return a context in which layers of the model can run in this process alone."""
        return nullcontext()

    def united(self, names: Collection[str]) -> set[str]:
        """Return the names that any process of this pipeline gives. All of them call this."""
        return set(names)

    def gather_text(self, topic: str, text: str) -> list[str]:  # noqa: ARG002
        """Return the texts of all processes, in the order of their indices."""
        return [text]

    def in_common(self, found: int, accepted: Callable[[], set[int]]) -> int:  # noqa: ARG002
        """Return the number of a recording that all processes can use, the highest one; 0 if there is none.

        `found` is the one that this process would use, 0 if it has none; `accepted` returns all that it could use.
        """
        return found

    def agree_on_graph(
        self, graph: TracedGraph, n_stages: int, counts: Sequence[int], changes: Sequence[ReadChange] = ()
    ) -> None:
        """Raise an error on all processes unless all recorded the same graph, after `changes` of the same values of the model."""

    def agree_on_error(self, error: PipecompileError) -> None:
        """Note that this process could not record the model. If none could, the pipeline goes on after the error."""

    def used(self, recording: int) -> None:
        """Note that the present call runs this recording, or one of a list of micro-batches that has others too."""

    def share_plan(self, planned: Planned | None) -> Planned:
        """Return the planner's plan on every process. `planned` is None on all processes but the planner."""
        assert planned is not None
        return planned

    def place(
        self,
        model: nn.Module,
        graph: TracedGraph,
        stages: Sequence[Stage],
        plan: Plan,
        options: Options,
        homes: Homes,
    ) -> Mirrors:
        """Move parameters and buffers to their homes. Return the mirrors of tensors that several devices use."""
        devices = [options.devices[device] for device in plan.placement]
        memories = plan.placement if options.partitions else self.memories(devices, plan.placement)
        of_devices = defaultdict[int, float](float)
        for device, stage in zip(plan.placement, plan.stages, strict=False):  # a plan may have no figures
            of_devices[device] += stage.memory
        held = [of_devices[device] for device in plan.placement]
        mirrors = place_stages(graph, stages, devices, memories, homes, held)
        homes.move_unused(model, options.devices[0])
        return mirrors

    def memories(self, devices: Sequence[torch.device], placement: Sequence[int]) -> Sequence[Hashable]:  # noqa: ARG002
        """Return the memory of each stage: stages with equal memories use the same tensor objects."""
        return devices

    def deferred_norms(self, norms: DeferredNorms) -> DeferredNorms:
        """Return the deferred BatchNorm statistics of a step over all copies of the pipeline."""
        return norms

    def executable(self, mirrors: Mirrors) -> Callable[..., Executable]:  # noqa: ARG002
        """Return the constructor of what runs a program."""
        return Executable

    def weigh(self, count: float, unit: str, floor: float = 0.0) -> None:
        """Note what the loss of this process counts in the step at hand, for the shares of several copies of the pipeline.

        The loss divides by no less than `floor`.
        """

    def loss_uses(self, weights: frozenset[int]) -> None:
        """Note the ids of the parameters that the loss of the step at hand uses, as far as is known."""

    def loss_values(self, weights: frozenset[int]) -> AbstractContextManager[None]:  # noqa: ARG002
        """Return a context in which a loss can read the parameters with these ids, before the step runs."""
        return nullcontext()

    def weights_of_target(self, weights: Weights, last: int) -> Weights:  # noqa: ARG002
        """Return the weights of micro-batches as pipeline device `last` has them, which runs the last stage and has the target."""
        return weights

    def values_ready(self, graph: TracedGraph, stages: Sequence[Stage], homes: Homes) -> None:
        """Make the parameters of all copies of the pipeline equal, once every parameter has values."""
