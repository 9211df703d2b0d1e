"""Replicas of a pipeline, each on a part of the batch: every step reduces their gradients, each gradient once.

pipeline 0    6 samples   gradient g0 ─┐
                                       ├─► 6/10 g0 + 4/10 g1, on both: the gradient of the mean over all 10 samples
pipeline 1    4 samples   gradient g1 ─┘

Copies may run different programs: a last batch has parts of other sizes, and none on some copies. All gradients are then reduced
at the end of the step, in the order of the parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from pipecompile.distributed.agreement.state_of_copies import StateOfCopies
from pipecompile.distributed.agreement.weights_of_copies import WeightsOfCopies
from pipecompile.distributed.collectives import CollectiveGroup
from pipecompile.distributed.data_parallel.gradient_reduction import GradientReduction, LossOfBatch, Parameters
from pipecompile.distributed.data_parallel.held_gradients import HeldGradients, Part
from pipecompile.distributed.data_parallel.sharded_parameters import ShardedParameters
from pipecompile.distributed.failures.failure_report import Disagreement
from pipecompile.errors import InputError
from pipecompile.torch_private.dtensors import local

__all__ = ["Replicas", "broadcast_from_first", "check_unwrapped"]


class Replicas:
    """The replicas of a pipeline: `group` has the ranks that run the stages of this rank; None if there is one pipeline.

    `shards` has the parameters that the replicas shard among themselves. `reductions` counts the messages that gradients have
    taken: in each step and dtype one for all gradients that are complete at the same place of the row, and one for the rest.
    `modes` are those of the present call, in words, which all replicas have in common.
    `loss_weights` has the ids of the parameters that the loss uses, as far as is known.
    `needs_one_program` returns why copies cannot run different programs; "" if they can. With `keeps_earlier`, gradients of earlier steps
    keep their values until the caller adds the new sums to them. `parts` are what the parts of the batch of all replicas count, and `unit`
    in what, in the last step that had begun. `held` has the gradients of steps under `no_sync`. `weights` compares the values of
    parameters, `state` what else a step reads.
    """

    def __init__(self, group: CollectiveGroup | None, shards: ShardedParameters) -> None:
        self.group, self.shards, self.reductions = group, shards, 0
        self.needs_one_program: Callable[[], str] = str
        self.loss_weights = frozenset[int]()
        self.modes = ""
        self.keeps_earlier, self.unit = False, "samples"
        self.parts: tuple[float, ...] = ()
        self.weights, self.state, self.held = WeightsOfCopies(), StateOfCopies(), HeldGradients()
        self._step: GradientReduction | None = None

    @property
    def is_unlike(self) -> bool:
        """Whether the copies run different programs in the present step."""
        return self._step is not None and not self._step.is_alike

    @contextmanager
    def reduced(self, parameters: Parameters, samples: int | None, *, trains: bool = True) -> Iterator[LossOfBatch]:
        """Run a step in this context; afterwards gradients are those of the whole batch, added to those of earlier steps.

        Yield a function from the loss of this replica to the loss of the whole batch. Parts of the batch are weighted by
        `samples`, or summed if it is None. A step that fails restores the gradients of earlier steps. Unless the step `trains`,
        gradients are left alone.
        """
        group = self.group
        if group is None:
            yield _same
            return
        if not trains:
            with self._begun(self._reduction(group, parameters, samples)) as step:
                yield step.loss_of_batch
            return
        with self.held.revealed(), self._begun(self._reduction(group, parameters, samples)) as step:
            earlier = {parameter: parameter.grad for parameter in parameters()}
            for parameter in earlier:
                parameter.grad = None
            try:
                yield step.loss_of_batch
                parts = self._ended(step)
            except BaseException:
                for parameter, gradient in earlier.items():
                    parameter.grad = gradient
                raise
            _add(parameters(), earlier, in_place=not self.keeps_earlier)
            if self.held.is_on:
                self.held.keep(parts)
            else:
                self.held.clear()

    def _reduction(self, group: CollectiveGroup, parameters: Parameters, samples: int | None) -> GradientReduction:
        return GradientReduction(group, self.shards, parameters, samples, self.held)

    def _ended(self, step: GradientReduction) -> list[Part]:
        """Reduce what is left, and wait for all; under `no_sync`, return the parts of this replica instead."""
        if self.held.is_on:
            return step.own_parts()
        self.reduce(None)
        step.finish()
        return []

    @contextmanager
    def _begun(self, step: GradientReduction) -> Iterator[GradientReduction]:
        self._step = step
        try:
            yield step
        finally:
            self._step = None

    def weigh(self, count: float, unit: str, floor: float = 0.0) -> None:
        """Weight this replica's part of the batch by a count in this unit instead of samples, if the step is a mean.

        The loss divides by no less than `floor`.
        """
        if self._step is not None and self._step.samples is not None:
            self._step.samples, self._step.unit, self._step.floor = count, unit, floor

    @property
    def weighed(self) -> tuple[float, float, bool]:
        """The count of this replica's part of the batch, the least divisor, and whether something else than samples is counted."""
        step = self._step
        return (0.0, 0.0, False) if step is None else (step.samples or 0.0, step.floor, step.unit != "samples")

    def agree(self, program: str | None) -> None:
        """Compare the programs that the replicas are about to run; None where the part of the batch has no samples.

        Raises Disagreement, on all replicas, if they cannot be run together. Has no effect outside a step.
        """
        if self._step is None:
            return
        self._step.agree(program, self.modes, self.weights, self.state)
        self.parts, self.unit = self._step.parts, self._step.unit
        if self.is_unlike and (why := self.needs_one_program()):
            raise Disagreement(
                "the copies of the pipeline are about to run different programs",
                where=f"here {program or 'none: there is no sample'}",
                why=why,
                hint="parts of the batch that are divided into the same number of micro-batches",
            )

    def reduce(self, complete: Container[int] | None) -> None:
        """Start to reduce the gradients of the parameters with the ids `complete`; with None, all that are left.

        Their gradients must not change any more in this step. If the copies run different programs, only None has an effect; under
        `no_sync`, nothing has.
        """
        assert self._step is not None
        if not self.held.is_on and (complete is None or self._step.is_alike):
            self.reductions += self._step.start(complete)


@torch.no_grad()
def _add(
    parameters: Iterator[nn.Parameter], earlier: dict[nn.Parameter, torch.Tensor | None], *, in_place: bool
) -> None:
    """Add the gradients of earlier steps."""
    for parameter in parameters:
        if (gradient := earlier.get(parameter)) is None:
            continue
        if parameter.grad is None:
            parameter.grad = gradient if in_place else gradient.clone()
        else:
            parameter.grad = gradient.add_(parameter.grad) if in_place else gradient + parameter.grad


def broadcast_from_first(tensors: Iterable[torch.Tensor], group: CollectiveGroup | None) -> None:
    """Overwrite tensors by those of the first replica. Raises RankLost."""
    if group is not None:
        for tensor in tensors:
            sent = local(tensor.detach())
            group.wait(dist.broadcast(sent, group=group.own(sent), group_src=0, async_op=True), sent)


def check_unwrapped(model: nn.Module) -> None:
    """Raise InputError for a model that is wrapped by fully_shard or DistributedDataParallel."""
    for name, module in model.named_modules():
        if isinstance(module, (FSDPModule, DistributedDataParallel)):
            is_fsdp = isinstance(module, FSDPModule)
            raise InputError(
                f"{'fully_shard' if is_fsdp else 'DistributedDataParallel'} has been called on the model",
                where=name,
                why="it acts when a module's own forward is called, and stages are cut from a recording",
                hint=f'the unwrapped model, and a mesh with the dimension "{"dp_shard" if is_fsdp else "dp"}"',
            )


def _same(loss: torch.Tensor | None) -> torch.Tensor:
    assert loss is not None
    return loss
