"""Ranks as threads of one process, under gloo."""

from __future__ import annotations

from time import monotonic, sleep
from typing import Any

import pytest
import torch

from pipecompile.distributed.failures.awake_clock import awake
from pipecompile.distributed.failures.board_watch import PendingWait
from pipecompile.distributed.failures.failure_report import Disagreement, RankLost
from pipecompile.errors import RunError
from tests.distributed.rank_threads import ThreadCommunicator, run_communicators


def error_of(function: Any) -> Exception:
    with pytest.raises(Exception) as caught:
        function()
    return caught.value


def test_values_go_around_three_ranks() -> None:
    def ring(communicator: ThreadCommunicator) -> list[float]:
        here, size = communicator.ranks.index, communicator.ranks.size
        after, before = (here + 1) % size, (here - 1) % size
        communicator.connect()
        communicator.expect(before, ["v#0", "v#1"])
        for step in range(2):
            communicator.send(after, f"v#{step}", torch.tensor(10.0 * here + step))
        received = [communicator.receive(before, f"v#{step}").item() for step in range(2)]
        communicator.flush()
        return received

    assert run_communicators(3, ring) == [[20, 21], [0, 1], [10, 11]]


def test_objects_are_sent_once() -> None:
    def run(communicator: ThreadCommunicator) -> Any:
        communicator.connect()
        if communicator.ranks.index == 0:
            communicator.send(1, "spans", [(0, "0F0")], once=True)
            communicator.flush()
            return None
        return communicator.receive(0, "spans", once=True)

    assert run_communicators(2, run)[1] == [(0, "0F0")]


def test_ranks_that_are_out_of_step_are_lost() -> None:
    def run(communicator: ThreadCommunicator) -> Exception | None:
        communicator.connect()
        if communicator.ranks.index == 0:
            communicator.send(1, "v#0", None)
            communicator.flush()
            return None
        communicator.expect(0, ["w#0"])
        return error_of(lambda: communicator.receive(0, "w#0"))

    lost = run_communicators(2, run)[1]
    assert isinstance(lost, RankLost)
    assert (lost.report.rank, lost.report.awaited) == (10, "w#0")
    assert "not in the same step" in lost.report.what


def test_a_failure_is_raised_on_all_ranks_and_ends_the_pipeline() -> None:
    """Rank 0 waits for a value of rank 1, which raises."""

    def step(communicator: ThreadCommunicator) -> None:
        with communicator.guarded():
            if communicator.ranks.index == 1:
                communicator.guard.action = "at 1F0"
                raise ValueError("the data are wrong")
            communicator.expect(1, ["v#0"])
            communicator.receive(1, "v#0")

    def run(communicator: ThreadCommunicator) -> tuple[Exception, Exception]:
        communicator.begin()
        communicator.connect()
        return error_of(lambda: step(communicator)), error_of(communicator.begin)

    (first, again), (second, _) = run_communicators(2, run)
    assert isinstance(second, ValueError)
    assert isinstance(first, RunError)
    assert first.what == "rank 11 failed at 1F0: ValueError: the data are wrong"
    assert "this pipeline failed before" in str(again)
    assert first.what in str(again)


def test_a_silent_rank_is_lost_after_the_timeout() -> None:
    def step(communicator: ThreadCommunicator) -> None:
        with communicator.guarded():
            communicator.expect(1, ["v#0"])
            communicator.receive(1, "v#0")

    def run(communicator: ThreadCommunicator) -> Exception | None:
        communicator.connect()
        if communicator.ranks.index == 0:
            return error_of(lambda: step(communicator))
        end = monotonic() + 20
        while communicator.board.failed() is None and monotonic() < end:
            sleep(0.05)
        return None

    lost = run_communicators(2, run, timeout=0.1)[0]
    assert isinstance(lost, RunError)
    assert "rank 11 failed: it has been silent for 0.1 s\n  where  waiting for v#0 from rank 11" in str(lost)


def test_a_disagreement_does_not_end_the_pipeline() -> None:
    def run(communicator: ThreadCommunicator) -> Exception:
        def step() -> None:
            with communicator.guarded():
                communicator.agree("graph", str(communicator.rank))

        error = error_of(step)
        communicator.begin()
        return error

    assert all(isinstance(error, Disagreement) for error in run_communicators(2, run))


def test_a_wait_is_posted_at_its_second_check_and_cleared_when_it_ends() -> None:
    class Work:
        def wait(self, timeout: object) -> None:
            for _ in range(2):
                communicator.check_wait()
                posted.append(communicator.board.wait_of(10))

    posted: list[Any] = []
    communicator = run_communicators(2, lambda each: each)[0]
    communicator.wait(1, Work(), "v#0")
    assert posted[0] is None
    assert (posted[1].rank, posted[1].name) == (11, "v#0")
    assert communicator.board.wait_of(10) is None


def test_the_root_of_a_chain_of_waits_is_reported() -> None:
    """Rank 0 waits for rank 1, and rank 1 for rank 2."""
    first, second, _ = run_communicators(3, lambda each: each)
    second.board.post_wait(12, "w#0")
    lost = first._lost(1, "the connection to it is gone", "v#0")
    assert (lost.report.rank, lost.report.awaited, lost.is_posted) == (12, "w#0", False)


def test_the_verdict_of_the_check_is_the_reason_of_a_broken_connection() -> None:
    communicator = run_communicators(2, lambda each: each, timeout=0.0)[0]
    communicator._waiting = communicator._seen = PendingWait(1, "v#0", since=awake() - 1)
    communicator.check_wait()
    lost = communicator.connection_lost(1, "", RuntimeError("Connection reset"))
    assert lost.report.what == "it has been silent for 0 s"


def test_a_message_on_a_gpu_is_polled_and_its_wait_is_posted() -> None:
    posted: list[Any] = []
    communicator = run_communicators(2, lambda each: each)[0]

    def is_over() -> bool:
        communicator.check_wait()
        posted.append(communicator.board.wait_of(10))
        return len(posted) == 3

    communicator.poll(1, "v#0", is_over)
    assert (posted[2].rank, posted[2].name) == (11, "v#0")
    assert communicator.board.wait_of(10) is None


@pytest.mark.parametrize("is_over_when_aborted", [True, False])
def test_a_message_on_a_gpu_that_cannot_come_raises_the_verdict(is_over_when_aborted: bool) -> None:
    """NCCL calls a message that was aborted completed: its elements are not numbers of the step."""
    communicator = run_communicators(2, lambda each: each, timeout=0.0)[0]
    aborted: list[bool] = []
    communicator.breakers.append(lambda: aborted.append(is_over_when_aborted))

    def is_over() -> bool:
        communicator.check_wait()
        return any(aborted)

    with pytest.raises(RankLost, match="it has been silent for 0 s"):
        communicator.poll(1, "v#0", is_over)
    assert aborted == [is_over_when_aborted]
