"""Copies of a pipeline, each on a part of the batch: after a step their gradients are put together, once.

pipeline 0    6 samples   gradient g0 ─┐
                                       ├─► 6/10 g0 + 4/10 g1, on both: that of the mean over all 10
pipeline 1    4 samples   gradient g1 ─┘
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from time import monotonic, sleep

import torch
import torch.distributed as dist
from torch import nn

from pipecompile.distributed.line import Line

__all__ = ["Replicas", "align"]


class Replicas:
    """`group` has this rank and those that run the same stages on other parts; None when there are none.

    `reductions` counts the messages that gradients took: one per dtype and step.
    """

    def __init__(self, group: dist.ProcessGroup | None, line: Line) -> None:
        self.group, self.line, self.reductions = group, line, 0

    @contextmanager
    def reduced(
        self, parameters: Callable[[], Iterator[nn.Parameter]], samples: int | None
    ) -> Iterator[Callable[[torch.Tensor], torch.Tensor]]:
        """A step in this context leaves the gradients of the whole batch; what it yields makes the loss of a part that of the
        whole. Parts are weighted by their samples, or added when those are None.
        """
        if self.group is None:
            yield lambda loss: loss
            return
        before = {parameter: parameter.grad for parameter in parameters()}
        for parameter in before:
            parameter.grad = None
        share = self._share(samples)
        yield lambda loss: self._sum(loss * share)
        with torch.no_grad():
            self._reduce([*parameters()], share)
            for parameter in parameters():
                if (kept := before.get(parameter)) is not None:
                    parameter.grad = kept if parameter.grad is None else kept.add_(parameter.grad)

    def _share(self, samples: int | None) -> float:
        if samples is None:
            return 1.0
        return samples / float(self._sum(torch.tensor(float(samples), dtype=torch.float64)))

    def _reduce(self, parameters: Sequence[nn.Parameter], share: float) -> None:
        """In one message per dtype, which says as well on how many ranks a parameter has a gradient at all."""
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        for dtype in dict.fromkeys(parameter.dtype for parameter in trained):
            group = [parameter for parameter in trained if parameter.dtype is dtype]
            parts = [(torch.zeros_like(p) if p.grad is None else p.grad * share).reshape(-1) for p in group]
            has = torch.tensor([float(p.grad is not None) for p in group], dtype=dtype, device=group[0].device)
            *whole, count = self._sum(torch.cat([*parts, has])).split_with_sizes(
                [*(p.numel() for p in group), len(group)]
            )
            self.reductions += 1
            for parameter, gradient, number in zip(group, whole, count.tolist(), strict=True):
                parameter.grad = gradient.view_as(parameter).clone() if number else None

    def _sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Over all copies."""
        made, start = tensor.detach().clone(), monotonic()
        work = dist.all_reduce(made, group=self.group, async_op=True)
        assert work is not None
        looked = start
        while not work.is_completed():
            sleep(0.0002)
            if monotonic() - looked > 0.5:
                self.line.look()
                looked = monotonic()
        work.wait()
        return made


def align(tensors: Iterable[torch.Tensor], group: dist.ProcessGroup | None) -> None:
    """Make these tensors what they are in the first copy of the pipeline."""
    if group is not None:
        for tensor in tensors:
            dist.broadcast(tensor.data, group=group, group_src=0)
