"""Waits on the status board, of ranks that are threads."""

from __future__ import annotations

from pipecompile.distributed.failures.board_watch import PendingWait
from pipecompile.distributed.failures.posted_wait import PostedWait
from tests.distributed.rank_threads import run_communicators


def test_a_wait_is_posted_though_the_one_before_ended_while_it_was_checked() -> None:
    """It was taken for posted: other ranks did not see that this one waits, and named it in the place of the cause."""
    communicator = run_communicators(2, lambda each: each)[0]
    waits: list[PendingWait] = []
    posted = PostedWait(communicator.board, communicator.ranks, lambda: waits[-1] if waits else None)
    posted.post(PendingWait(1, "v#0"))  # it is over by now
    assert communicator.board.wait_of(10) is None
    waits.append(PendingWait(1, "w#0"))
    posted.post(waits[0])
    found = communicator.board.wait_of(10)
    assert found is not None
    assert found.name == "w#0"
    posted.clear()
    assert communicator.board.wait_of(10) is None
