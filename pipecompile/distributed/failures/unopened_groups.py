"""Process groups that did not open in time, and the rank that did not come to one.

rank 0   opens 0, 2 ──────► waits for rank 2, which waits as well: its report names rank 3
rank 2   opens 2, 3 ──────► waits for rank 3, which has posted no wait
rank 3   stopped
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from time import monotonic

from pipecompile.distributed.failures.board_watch import PATIENCE, POLL, await_report
from pipecompile.distributed.failures.failure_report import FailureReport, RankLost
from pipecompile.distributed.failures.status_board import StatusBoard

__all__ = ["GroupNotOpened", "lost_at_opening", "opening"]

_CONNECTION = "connections"
"""Name of what a rank waits for that opens its connections."""

_LATE = 0.9
"""Share of the timeout from which on an error is that of the timeout. Torch measures it by a clock of its own."""


class GroupNotOpened(Exception):
    """The process group of `ranks` did not open, for the reason of torch. `is_late`: the timeout was over."""

    def __init__(self, ranks: Iterable[int], error: RuntimeError, *, is_late: bool = True) -> None:
        super().__init__(str(error).partition("\n")[0])
        self.ranks, self.is_late = tuple(ranks), is_late


@contextmanager
def opening(ranks: Iterable[int], timeout: float) -> Iterator[None]:
    """Raise GroupNotOpened for a RuntimeError of torch in this context, which opens the group of these ranks within `timeout` seconds."""
    begun = monotonic()
    try:
        yield
    except RuntimeError as error:
        raise GroupNotOpened(ranks, error, is_late=monotonic() - begun > _LATE * timeout) from None


def lost_at_opening(board: StatusBoard, failed: GroupNotOpened) -> RankLost:
    """Return the loss of the rank that did not come to the opening of a group: one that has ended, or that does not wait itself. If all
    ranks of the group wait, one of them knows more: it waits in another group. An error before the timeout is of this rank's own
    resources, such as open files, unless another rank has failed.
    """
    board.post_wait(board.rank, _CONNECTION)
    others = [rank for rank in failed.ranks if rank != board.rank] if failed.is_late else [board.rank]
    try:
        await_report(board.look_for_ended, 2 * POLL)
        late = [rank for rank in others if board.wait_of(rank) is None]
        if not late and failed.is_late:
            await_report(board.check, PATIENCE, 0.1)
    except RankLost as lost:
        return lost
    what = f"it did not open its connections: {failed}"
    report = FailureReport((late or others)[0], what, action="before its connections were open")
    return RankLost(report, is_posted=False)
