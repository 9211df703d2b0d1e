"""Ranks that put tensors together. While one waits for the others it looks at the board, so that none waits for a rank that failed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import monotonic, sleep

import torch
import torch.distributed as dist

from pipecompile.distributed.line import Line

__all__ = ["Circle", "Coming", "Message"]


class Circle:
    """The ranks of `group`. All of them call the same, in the same order; what one begins, it may wait for in any."""

    def __init__(self, group: dist.ProcessGroup, line: Line) -> None:
        self.group, self.line, self.size, self.index = group, line, group.size(), group.rank()

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Over all ranks."""
        return self.begin_sum(tensor.detach().clone()).wait()

    def largest(self, tensor: torch.Tensor) -> torch.Tensor:
        """Over all ranks, element by element."""
        return self._begin(tensor.detach().clone(), dist.ReduceOp.MAX).wait()

    def rows(self, row: torch.Tensor) -> torch.Tensor:
        """What each rank has, as rows of one tensor."""
        made = row.new_empty(self.size, row.numel())
        self.wait(dist.all_gather_into_tensor(made.view(-1), row, self.group, async_op=True))
        return made

    def begin_sum(self, tensor: torch.Tensor) -> Coming:
        """Over all ranks, in the tensor itself."""
        return self._begin(tensor, dist.ReduceOp.SUM)

    def begin_own_row(self, rows: torch.Tensor) -> Coming:
        """Of the sum over all ranks of `rows`, a row per rank, the one of this rank. What was in `rows` is lost."""
        if rows.device.type == "cpu":  # gloo's reduce-scatter is that, too, and cannot be asked whether it is done
            return Coming(self, self.begin_sum(rows).work, rows[self.index])
        made = rows.new_empty(rows.shape[1])
        return Coming(self, dist.reduce_scatter_tensor(made, rows.view(-1), group=self.group, async_op=True), made)

    def _begin(self, tensor: torch.Tensor, how: dist.ReduceOp.RedOpType) -> Coming:
        return Coming(self, dist.all_reduce(tensor, how, self.group, async_op=True), tensor)

    def wait(self, work: dist.Work | None) -> None:
        """Until the ranks are done with it. Raises Lost."""
        assert work is not None
        looked = monotonic()
        while not work.is_completed():
            sleep(0.0002)
            if monotonic() - looked > 0.5:
                self.line.look()
                looked = monotonic()
        work.wait()


@dataclass(frozen=True, slots=True, eq=False)
class Coming:
    """What a circle puts together while this rank goes on."""

    circle: Circle
    work: dist.Work | None
    made: torch.Tensor

    def wait(self) -> torch.Tensor:
        """What has come. Raises Lost."""
        self.circle.wait(self.work)
        return self.made


@dataclass(slots=True, eq=False)
class Message:
    """Gradients of `weights` on their way: what comes, goes through `further` circles, and is for `settle` then."""

    weights: Sequence[torch.Tensor]
    coming: Coming
    further: Sequence[Circle]
    settle: Callable[[torch.Tensor], None]

    def go_on(self) -> None:
        """Wait for the first circle, if there are more, and begin with the next."""
        for circle in self.further:
            self.coming = circle.begin_sum(self.coming.wait())
