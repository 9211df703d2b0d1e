"""Copies of a pipeline, each on a part of the batch: in a step their gradients are put together, each once.

pipeline 0    6 samples   gradient g0 ─┐
                                       ├─► 6/10 g0 + 4/10 g1, on both: that of the mean over all 10
pipeline 1    4 samples   gradient g1 ─┘
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from hashlib import sha256

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from pipecompile.distributed.blame import Disagreement
from pipecompile.distributed.collectives import CollectiveGroup, GradientBucket
from pipecompile.distributed.sharded_parameters import ShardedParameters
from pipecompile.errors import InputError, RunError
from pipecompile.torch_private.dtensors import gradient_of, like, local

__all__ = ["Replicas", "broadcast_from_first", "check_unwrapped"]


class Replicas:
    """`group` has this rank and those that run the same stages on other parts; None when there are none. What they keep of
    their parameters in parts, `shards` knows. `reductions` is how many messages gradients took until now: per step and dtype
    one for all that are complete at the same place of the row, and one for what the row does not complete.
    """

    def __init__(self, group: CollectiveGroup | None, shards: ShardedParameters) -> None:
        self.group, self.shards, self.reductions = group, shards, 0
        self._step: GradientReduction | None = None

    @contextmanager
    def reduced(
        self, parameters: Callable[[], Iterator[nn.Parameter]], samples: int | None
    ) -> Iterator[Callable[[torch.Tensor], torch.Tensor]]:
        """A step in this context leaves the gradients of the whole batch, of the `parameters` that each copy has whole and of those
        it has in parts; what it yields makes the loss of a part of the batch that of the whole. Parts are weighted by their
        samples, or added when those are None. One that fails leaves the gradients that were there before.
        """
        group = self.group
        if group is None:
            yield lambda loss: loss
            return
        before = {parameter: parameter.grad for parameter in parameters()}
        for parameter in before:
            parameter.grad = None
        try:
            self._step = step = GradientReduction(group, self.shards, parameters, samples)
            yield lambda loss: group.sum(loss * step.share)
            self.reduce(None)
            step.end()
        except BaseException:
            for parameter, gradient in before.items():
                parameter.grad = gradient
            raise
        finally:
            self._step = None
        with torch.no_grad():
            for parameter in parameters():
                if (kept := before.get(parameter)) is not None:
                    parameter.grad = kept if parameter.grad is None else kept.add_(parameter.grad)

    def agree(self, program: str) -> None:
        """In a step: raise Disagreement, on all copies, unless all are about to run this program."""
        if self._step is not None:
            self._step.agree(program)

    def reduce(self, complete: Container[int] | None) -> None:
        """In a step: begin with the gradients of these parameters, known by their numbers, which nothing is added to any more, or
        with all that are left.
        """
        assert self._step is not None
        self.reductions += self._step.begin(complete)


class GradientReduction:
    """The gradients of one step, on their way to those of the whole batch.

    row        3B0  3B1  1B0  1B1
    group              [ 3 ─────── ]  [ 1 ]  [ the rest ]     all are waited for at the end, and in this order on all copies
    """

    def __init__(
        self,
        group: CollectiveGroup,
        shards: ShardedParameters,
        parameters: Callable[[], Iterator[nn.Parameter]],
        samples: int | None,
    ) -> None:
        self.group, self.shards, self.parameters, self.samples = group, shards, parameters, samples
        self.share = 1.0
        self._messages: list[GradientBucket] = []

    @cached_property
    def whole(self) -> tuple[nn.Parameter, ...]:
        """Asked for when it is known which live here."""
        return tuple(self.parameters())

    def agree(self, program: str) -> None:
        """On the order of messages, which is that of the program; and on how much each part of the batch counts."""
        mark = float(int(sha256(program.encode()).hexdigest()[:12], 16))
        said = self.group.rows(torch.tensor([self.samples or 0.0, mark], dtype=torch.float64))
        if (said[:, 1] != mark).any():
            raise Disagreement(
                "the copies of the pipeline are about to run different programs",
                where=f"here {program}",
                why="their gradients are put together in the order of the program",
                hint="parts of the batch that are divided into the same number of micro-batches",
            )
        if self.samples is not None:
            self.share = self.samples / float(said[:, 0].sum())

    @torch.no_grad()
    def begin(self, complete: Container[int] | None) -> int:
        """The number of messages begun."""
        begun = {id(weight) for message in self._messages for weight in message.weights}

        def is_due(weight: torch.Tensor) -> bool:
            return id(weight) not in begun if complete is None else id(weight) in complete

        trained = [parameter for parameter in self.whole if parameter.requires_grad and is_due(parameter)]
        dtypes = dict.fromkeys(parameter.dtype for parameter in trained)
        new = [self._message([p for p in trained if p.dtype is dtype]) for dtype in dtypes]
        new += self.shards.reduced(is_due, self.share)
        self._messages += new
        return len(new)

    def _message(self, group: Sequence[nn.Parameter]) -> GradientBucket:
        """Which says as well on how many ranks a parameter has a gradient at all."""
        parts = [local(gradient_of(parameter)).reshape(-1) for parameter in group]
        has = torch.tensor([float(p.grad is not None) for p in group]).to(parts[0])
        flat = torch.cat([*parts, has])
        flat[: -len(group)].mul_(self.share)
        for parameter in group:
            parameter.grad = None
        sizes = [*map(len, parts), len(group)]
        return GradientBucket(group, self.group.begin_sum(flat), (), partial(_receive, group, sizes))

    @torch.no_grad()
    def end(self) -> None:
        """Wait for all, then let the parameters have them. Raises RunError for a gradient that came too late."""
        for message in self._messages:
            message.go_on()
        made = [message.coming.wait() for message in self._messages]
        if late := [weight for message in self._messages for weight in message.weights if weight.grad is not None]:
            raise RunError(
                f"a gradient was added to {len(late)} parameters when those of all copies were being put together",
                stage=None,
                microbatch=0,
                why="no stage of this rank that uses them had a backward to come: a hook may have added it",
                hint="add it where the parameter is used, or after the step",
            )
        for message, tensor in zip(self._messages, made, strict=True):
            message.settle(tensor)


def _receive(group: Sequence[nn.Parameter], sizes: Sequence[int], flat: torch.Tensor) -> None:
    *whole, count = flat.split_with_sizes(sizes)
    for parameter, gradient, number in zip(group, whole, count.tolist(), strict=True):
        parameter.grad = like(parameter, gradient.clone()) if number else None


def broadcast_from_first(tensors: Iterable[torch.Tensor], group: dist.ProcessGroup | None) -> None:
    """Make these tensors what they are in the first copy of the pipeline."""
    if group is not None:
        for tensor in tensors:
            dist.broadcast(local(tensor.detach()), group=group, group_src=0)


def check_unwrapped(model: nn.Module) -> None:
    """Raise InputError for a model that another keeper of copies acts on already."""
    for name, module in model.named_modules():
        if isinstance(module, (FSDPModule, DistributedDataParallel)):
            shards = isinstance(module, FSDPModule)
            raise InputError(
                f"{'fully_shard' if shards else 'DistributedDataParallel'} has been called on the model",
                where=name,
                why="it acts when a module's own forward is called, and stages are cut from a recording",
                hint=f'the model as it was, and a mesh with the dimension "{"dp_shard" if shards else "dp"}"',
            )
