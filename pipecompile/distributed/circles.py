"""Ranks that put tensors together. While one waits for the others it looks at the board, so that none waits for a rank that failed."""

from __future__ import annotations

from time import monotonic, sleep

import torch
import torch.distributed as dist

from pipecompile.distributed.line import Line

__all__ = ["Circle"]


class Circle:
    """The ranks of `group`. All of them call the same, in the same order."""

    def __init__(self, group: dist.ProcessGroup, line: Line) -> None:
        self.group, self.line, self.size, self.index = group, line, group.size(), group.rank()

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Over all ranks."""
        return self._reduced(tensor, dist.ReduceOp.SUM)

    def largest(self, tensor: torch.Tensor) -> torch.Tensor:
        """Over all ranks, element by element."""
        return self._reduced(tensor, dist.ReduceOp.MAX)

    def rows(self, row: torch.Tensor) -> torch.Tensor:
        """What each rank has, as rows of one tensor."""
        made = row.new_empty(self.size, row.numel())
        self._wait(dist.all_gather_into_tensor(made.view(-1), row, self.group, async_op=True))
        return made

    def own_row(self, rows: torch.Tensor) -> torch.Tensor:
        """Of the sum over all ranks of `rows`, a row per rank, the one of this rank."""
        if rows.device.type == "cpu":  # gloo's reduce-scatter is that, too, and cannot be asked whether it is done
            return self.sum(rows)[self.index]
        made = rows.new_empty(rows.shape[1])
        self._wait(dist.reduce_scatter_tensor(made, rows.view(-1), group=self.group, async_op=True))
        return made

    def _reduced(self, tensor: torch.Tensor, how: dist.ReduceOp.RedOpType) -> torch.Tensor:
        made = tensor.detach().clone()
        self._wait(dist.all_reduce(made, how, self.group, async_op=True))
        return made

    def _wait(self, work: dist.Work | None) -> None:
        assert work is not None
        looked = monotonic()
        while not work.is_completed():
            sleep(0.0002)
            if monotonic() - looked > 0.5:
                self.line.look()
                looked = monotonic()
        work.wait()
