"""Copies of a pipeline, each on a part of the batch: after a step their gradients are put together, once.

pipeline 0    6 samples   gradient g0 ─┐
                                       ├─► 6/10 g0 + 4/10 g1, on both: that of the mean over all 10
pipeline 1    4 samples   gradient g1 ─┘
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from pipecompile.distributed.circles import Circle
from pipecompile.distributed.shards import Shards
from pipecompile.dtensors import gradient_of, like, local
from pipecompile.errors import InputError

__all__ = ["Replicas", "align", "check_unwrapped"]


class Replicas:
    """`circle` has this rank and those that run the same stages on other parts; None when there are none. What they keep of
    their parameters in parts, `shards` knows.
    """

    def __init__(self, circle: Circle | None, shards: Shards) -> None:
        self.circle, self.shards, self._reductions = circle, shards, 0

    @property
    def reductions(self) -> int:
        """How many messages gradients took until now: per step one per dtype of what each copy has whole, and of what it keeps
        in parts.
        """
        return self._reductions + self.shards.reductions

    @contextmanager
    def reduced(
        self, parameters: Callable[[], Iterator[nn.Parameter]], samples: int | None
    ) -> Iterator[Callable[[torch.Tensor], torch.Tensor]]:
        """A step in this context leaves the gradients of the whole batch, of the `parameters` that each copy has whole and of those
        it has in parts; what it yields makes the loss of a part of the batch that of the whole. Parts are weighted by their
        samples, or added when those are None.
        """
        circle = self.circle
        if circle is None:
            yield lambda loss: loss
            return
        before = {parameter: parameter.grad for parameter in parameters()}
        for parameter in before:
            parameter.grad = None
        share = 1.0 if samples is None else self._share(circle, samples)
        yield lambda loss: circle.sum(loss * share)
        with torch.no_grad():
            self._reduce(circle, [*parameters()], share)
            self.shards.reduce(share)
            for parameter in parameters():
                if (kept := before.get(parameter)) is not None:
                    parameter.grad = kept if parameter.grad is None else kept.add_(parameter.grad)

    @staticmethod
    def _share(circle: Circle, samples: int) -> float:
        return samples / float(circle.sum(torch.tensor(float(samples), dtype=torch.float64)))

    def _reduce(self, circle: Circle, parameters: Sequence[nn.Parameter], share: float) -> None:
        """In one message per dtype, which says as well on how many ranks a parameter has a gradient at all."""
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        for dtype in dict.fromkeys(parameter.dtype for parameter in trained):
            group = [parameter for parameter in trained if parameter.dtype is dtype]
            parts = [local(gradient_of(parameter) * share).reshape(-1) for parameter in group]
            has = torch.tensor([float(p.grad is not None) for p in group]).to(parts[0])
            sizes = [*map(len, parts), len(group)]
            *whole, count = circle.sum(torch.cat([*parts, has])).split_with_sizes(sizes)
            self._reductions += 1
            for parameter, gradient, number in zip(group, whole, count.tolist(), strict=True):
                parameter.grad = like(parameter, gradient.clone()) if number else None


def align(tensors: Iterable[torch.Tensor], group: dist.ProcessGroup | None) -> None:
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
