"""Replicas of a pipeline, each on a part of the batch: every step reduces their gradients, each gradient once.

pipeline 0    6 samples   gradient g0 ─┐
                                       ├─► 6/10 g0 + 4/10 g1, on both: the gradient of the mean over all 10 samples
pipeline 1    4 samples   gradient g1 ─┘
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from hashlib import sha256
from math import nan

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from pipecompile.distributed.collectives import CollectiveGroup, GradientBucket
from pipecompile.distributed.failure_report import Disagreement
from pipecompile.distributed.sharded_parameters import ShardedParameters, weigh_in_place
from pipecompile.errors import InputError, RunError
from pipecompile.torch_private.dtensors import gradient_of, like, local

__all__ = ["Replicas", "broadcast_from_first", "check_unwrapped"]

Parameters = Callable[[], Iterator[nn.Parameter]]
"""A function that yields the parameters of this rank that every replica has whole."""


class Replicas:
    """The replicas of a pipeline: `group` has the ranks that run the stages of this rank; None if there is one pipeline.

    `shards` has the parameters that the replicas shard among themselves. `reductions` counts the messages that gradients have
    taken: in each step and dtype one for all gradients that are complete at the same place of the row, and one for the rest.
    """

    def __init__(self, group: CollectiveGroup | None, shards: ShardedParameters) -> None:
        self.group, self.shards, self.reductions = group, shards, 0
        self._step: GradientReduction | None = None

    @contextmanager
    def reduced(
        self, parameters: Parameters, samples: int | None, *, trains: bool = True
    ) -> Iterator[Callable[[torch.Tensor], torch.Tensor]]:
        """Run a step in this context; afterwards gradients are those of the whole batch, added to those of earlier steps.

        Yield a function from the loss of this replica to the loss of the whole batch. Parts of the batch are weighted by
        `samples`, or summed if it is None. A step that fails restores the gradients of earlier steps. Unless the step `trains`,
        gradients are left alone.
        """
        group = self.group
        if group is None:
            yield lambda loss: loss
            return
        if not trains:
            with self._begun(GradientReduction(group, self.shards, parameters, samples)) as step:
                yield lambda loss: group.sum(step.part_of(loss))
            return
        earlier = {parameter: parameter.grad for parameter in parameters()}
        for parameter in earlier:
            parameter.grad = None
        try:
            with self._begun(GradientReduction(group, self.shards, parameters, samples)) as step:
                yield lambda loss: group.sum(step.part_of(loss))
                self.reduce(None)
                step.finish()
        except BaseException:
            for parameter, gradient in earlier.items():
                parameter.grad = gradient
            raise
        _add(parameters(), earlier)

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

    def agree(self, program: str) -> None:
        """Raise Disagreement, on all replicas, unless all are about to run this program. Has no effect outside a step."""
        if self._step is not None:
            self._step.agree(program)

    def reduce(self, complete: Container[int] | None) -> None:
        """Start to reduce the gradients of the parameters with the ids `complete`; with None, all that are left.

        Their gradients must not change any more in this step.
        """
        assert self._step is not None
        self.reductions += self._step.start(complete)


@torch.no_grad()
def _add(parameters: Iterator[nn.Parameter], earlier: dict[nn.Parameter, torch.Tensor | None]) -> None:
    """Add the gradients of earlier steps."""
    for parameter in parameters:
        if (gradient := earlier.get(parameter)) is not None:
            parameter.grad = gradient if parameter.grad is None else gradient.add_(parameter.grad)


class GradientReduction:
    """The reduction of the gradients of one step.

    row        3B0  3B1  1B0  1B1
    buckets             [ 3 ─────── ]  [ 1 ]  [ the rest ]     started in this order on all replicas, waited for at the end

    `share` is the weight of this replica's part of the batch.
    """

    def __init__(
        self, group: CollectiveGroup, shards: ShardedParameters, parameters: Parameters, samples: float | None
    ) -> None:
        self.group, self.shards, self.parameters, self.samples = group, shards, parameters, samples
        self.share, self.unit, self.floor = 1.0, "samples", 0.0
        self._buckets: list[GradientBucket] = []

    @cached_property
    def whole(self) -> tuple[nn.Parameter, ...]:
        """The parameters that every replica has whole; read when the step runs, since a first step places them."""
        return tuple(self.parameters())

    def agree(self, program: str) -> None:
        """Compare the program, whose order is that of the buckets, and compute `share` from the samples of all replicas."""
        program = program if self.unit == "samples" else f"{program}, weighted by {self.unit}"
        digest = float(int(sha256(program.encode()).hexdigest()[:12], 16))
        rows = self.group.all_gather(torch.tensor([self.samples or 0.0, digest], dtype=torch.float64))
        if (rows[:, 1] != digest).any():
            raise Disagreement(
                "the copies of the pipeline are about to run different programs",
                where=f"here {program}",
                why="their gradients are reduced in the order of the program",
                hint="parts of the batch that are divided into the same number of micro-batches",
            )
        if self.samples is not None:
            total = max(float(rows[:, 0].sum()), self.floor)
            self.share = max(self.samples, self.floor) / total if total else nan  # 0/0, as the loss of the whole batch

    def part_of(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the part of this replica's loss in that of the batch. A loss that counts nothing may be 0/0."""
        return loss * self.share if self.share else torch.zeros_like(loss)

    @torch.no_grad()
    def start(self, complete: Container[int] | None) -> int:
        """Start to reduce gradients, a bucket per dtype; return the number of buckets."""
        started = {id(weight) for bucket in self._buckets for weight in bucket.weights}

        def is_due(weight: torch.Tensor) -> bool:
            return id(weight) not in started if complete is None else id(weight) in complete

        trained = [parameter for parameter in self.whole if parameter.requires_grad and is_due(parameter)]
        dtypes = dict.fromkeys(parameter.dtype for parameter in trained)
        buckets = [self._bucket([p for p in trained if p.dtype is dtype]) for dtype in dtypes]
        buckets += self.shards.reduced(is_due, self.share)
        self._buckets += buckets
        return len(buckets)

    def _bucket(self, parameters: Sequence[nn.Parameter]) -> GradientBucket:
        """Start one bucket: the weighted gradients, and per parameter the number of ranks that have a gradient for it."""
        gradients = [local(gradient_of(parameter)).reshape(-1) for parameter in parameters]
        has_gradient = torch.tensor([float(p.grad is not None) for p in parameters]).to(gradients[0])
        flat = torch.cat([*gradients, has_gradient])
        weigh_in_place(flat[: -len(parameters)], self.share)
        for parameter in parameters:
            parameter.grad = None
        sizes = [*map(len, gradients), len(parameters)]
        return GradientBucket(parameters, self.group.start_sum(flat), (), partial(_set_gradients, parameters, sizes))

    @torch.no_grad()
    def finish(self) -> None:
        """Wait for all buckets and set the gradients. Raises RunError for a gradient that was added after its bucket started."""
        for bucket in self._buckets:
            bucket.start_further()
        results = [bucket.pending.wait() for bucket in self._buckets]
        if late := [weight for bucket in self._buckets for weight in bucket.weights if weight.grad is not None]:
            raise RunError(
                f"a gradient was added to {len(late)} parameter{'s' * (len(late) > 1)} while the gradients of all copies"
                " were being reduced",
                stage=None,
                microbatch=0,
                why="all backwards of this rank that use the parameter were over: a hook may have added the gradient",
                hint="add it where the parameter is used, or after the step",
            )
        for bucket, result in zip(self._buckets, results, strict=True):
            bucket.settle(result)


def _set_gradients(parameters: Sequence[nn.Parameter], sizes: Sequence[int], flat: torch.Tensor) -> None:
    """Take the gradients out of a reduced bucket; a parameter without a gradient on any rank gets none."""
    *gradients, counts = flat.split_with_sizes(sizes)
    for parameter, gradient, count in zip(parameters, gradients, counts.tolist(), strict=True):
        parameter.grad = like(parameter, gradient.clone()) if count else None


def broadcast_from_first(tensors: Iterable[torch.Tensor], group: dist.ProcessGroup | None) -> None:
    """Overwrite tensors by those of the first replica."""
    if group is not None:
        for tensor in tensors:
            dist.broadcast(local(tensor.detach()), group=group, group_src=0)


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
