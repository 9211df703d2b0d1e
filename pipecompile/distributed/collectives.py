"""Ranks that put tensors together. While one waits for the others it looks at the board, so that none waits for a rank that failed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import monotonic, sleep

import torch
import torch.distributed as dist

from pipecompile.distributed.blame import FailureReport, RankLost
from pipecompile.distributed.board_watch import POLL
from pipecompile.distributed.communicator import Communicator

__all__ = ["OWED", "CollectiveGroup", "PendingCollective", "GradientBucket"]

OWED = "its part of a sum"
"""What a rank of a group is waited for."""

_PATIENCE = 4 * POLL
"""Seconds that a group gives others to report a rank before it does."""


class CollectiveGroup:
    """The ranks of `group`. All of them call the same, in the same order; what one begins, it may wait for in any."""

    def __init__(self, group: dist.ProcessGroup, communicator: Communicator) -> None:
        self.group, self.communicator, self.size, self.index = group, communicator, group.size(), group.rank()

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

    def begin_sum(self, tensor: torch.Tensor) -> PendingCollective:
        """Over all ranks, in the tensor itself."""
        return self._begin(tensor, dist.ReduceOp.SUM)

    def begin_own_row(self, rows: torch.Tensor) -> PendingCollective:
        """Of the sum over all ranks of `rows`, a row per rank, the one of this rank. What was in `rows` is lost."""
        if rows.device.type == "cpu":  # gloo's reduce-scatter is that, too, and cannot be asked whether it is done
            return PendingCollective(self, self.begin_sum(rows).work, rows[self.index])
        made = rows.new_empty(rows.shape[1])
        return PendingCollective(
            self, dist.reduce_scatter_tensor(made, rows.view(-1), group=self.group, async_op=True), made
        )

    def _begin(self, tensor: torch.Tensor, how: dist.ReduceOp.RedOpType) -> PendingCollective:
        return PendingCollective(self, dist.all_reduce(tensor, how, self.group, async_op=True), tensor)

    def wait(self, work: dist.Work | None) -> None:
        """Until the ranks are done with it. Raises RankLost."""
        assert work is not None
        begun = looked = monotonic()
        try:
            while not work.is_completed():
                sleep(0.0002)
                if monotonic() - looked > POLL:
                    looked = monotonic()
                    self._look(looked - begun)
            work.wait()
        except RuntimeError as error:
            raise self._lost(f"the connection to it is gone: {str(error).partition(chr(10))[0]}") from None
        if looked != begun:
            self.communicator.board.unsay_wait()

    def _look(self, waited: float) -> None:
        """Let others read for whom this rank waits; raise RankLost when it need not any more."""
        self.communicator.look()
        self.communicator.board.say_wait(self._late()[0], OWED)
        if waited > self.communicator.timeout:
            raise self._lost(f"it has been silent for {self.communicator.timeout:.3g} s")

    def _late(self) -> list[int]:
        """The ranks that may be waited for: those that do not wait themselves."""
        others = [rank for rank in dist.get_process_group_ranks(self.group) if rank != self.communicator.rank]
        return [rank for rank in others if self.communicator.board.waits(rank) is None] or others

    def _lost(self, what: str) -> RankLost:
        """Who does not come. Its pipeline knows better what it owes, and may say so first."""
        end = monotonic() + _PATIENCE
        while monotonic() < end:
            self.communicator.look()
            sleep(POLL)
        late = self._late()
        rank, name = self.communicator.board.to_blame(late[0], OWED)
        one = f" (or to another of ranks {', '.join(map(str, late))})" if len(late) > 1 else ""
        return RankLost(
            FailureReport(rank, what + one, f"{name} was to come from it", f"before {name} had come"), is_told=False
        )


@dataclass(frozen=True, slots=True, eq=False)
class PendingCollective:
    """What a group puts together while this rank goes on."""

    group: CollectiveGroup
    work: dist.Work | None
    made: torch.Tensor

    def wait(self) -> torch.Tensor:
        """What has come. Raises RankLost."""
        self.group.wait(self.work)
        return self.made


@dataclass(slots=True, eq=False)
class GradientBucket:
    """Gradients of `weights` on their way: what comes, goes through `further` groups, and is for `settle` then."""

    weights: Sequence[torch.Tensor]
    coming: PendingCollective
    further: Sequence[CollectiveGroup]
    settle: Callable[[torch.Tensor], None]

    def go_on(self) -> None:
        """Wait for the first group, if there are more, and begin with the next."""
        for group in self.further:
            self.coming = group.begin_sum(self.coming.wait())
