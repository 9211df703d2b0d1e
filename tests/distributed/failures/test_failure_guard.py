"""The guard of calls: what is posted, what is raised, and what a later call says."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import HashStore

from pipecompile.distributed.failures.failure_guard import FailureGuard
from pipecompile.distributed.failures.failure_report import CopyDisagreement, Disagreement, FailureReport, RankLost
from pipecompile.distributed.failures.status_board import StatusBoard
from pipecompile.errors import InputError, RunError


def guard_of(store: Any, rank: int) -> tuple[FailureGuard, list[int]]:
    ended: list[int] = []
    ranks: Any = SimpleNamespace(copy=(0, 1), members=(0, 1), beside=(1 - rank,))
    return FailureGuard(StatusBoard(store, (0, 1), rank, 0.2), ranks, lambda: ended.append(rank)), ended


def test_the_failure_of_this_rank_is_posted_and_that_of_another_is_raised() -> None:
    store = HashStore()
    (own, ended), (other, others_ended) = guard_of(store, 0), guard_of(store, 1)
    own.action = "at 0F1"
    with pytest.raises(ValueError, match="bad data"), own.guarded():
        raise ValueError("bad data")
    report = other.board.failed()
    assert report is not None
    with pytest.raises(RunError, match="rank 0 failed at 0F1: ValueError: bad data"), other.guarded():
        raise RankLost(report, is_posted=True)
    assert (own.lost, other.lost, own.action) == (None, report, "")
    assert (ended, others_ended) == ([0], [1])
    for guard in (own, other):
        with pytest.raises(RunError, match="this pipeline failed before"):
            guard.require_whole()


BROKEN = RuntimeError("[/x/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:12")


@pytest.mark.parametrize("is_posted", [True, False])
def test_a_broken_connection_of_torch_is_the_failure_of_the_rank_that_broke_it(
    monkeypatch: pytest.MonkeyPatch, is_posted: bool
) -> None:
    store = HashStore()
    (own, _), (other, _) = guard_of(store, 0), guard_of(store, 1)
    if is_posted:
        other.board.post_failure(FailureReport(1, "ValueError: bad data"))
    else:
        monkeypatch.setattr(
            own.board, "cause", lambda rank, otherwise: "its process has ended" if rank == 1 else otherwise
        )
    said = (
        "ValueError: bad data"
        if is_posted
        else "before its part of a collective of torch arrived: its process has ended"
    )
    with pytest.raises(RunError, match=f"rank 1 failed.*{said}"), own.guarded():
        raise BROKEN
    report = own.board.failed()
    assert report is not None
    assert report.rank == 1


def test_a_broken_connection_in_a_layer_of_a_stage_is_the_failure_of_the_rank_that_broke_it() -> None:
    """A rank of `tp` blamed itself for the collective that another one had left."""
    store = HashStore()
    (own, _), (other, _) = guard_of(store, 0), guard_of(store, 1)
    other.board.post_failure(FailureReport(1, "ValueError: bad data"))
    with pytest.raises(RunError, match="rank 1 failed: ValueError: bad data"), own.guarded():
        raise RunError("stage 0 failed in forward", stage=0, microbatch=0) from BROKEN


def test_a_broken_connection_is_the_own_failure_where_no_other_rank_has_failed() -> None:
    guard, _ = guard_of(HashStore(), 0)
    with pytest.raises(RuntimeError, match="closed by peer"), guard.guarded():
        raise BROKEN
    report = guard.board.failed()
    assert report is not None
    assert report.rank == 0


def test_a_rank_that_does_not_come_to_a_collective_in_a_layer_is_named_by_those_that_wait() -> None:
    """A rank of `tp` blamed itself for the one that was stopped."""
    guard, _ = guard_of(HashStore(), 0)
    late = RuntimeError("[/x/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 200ms for recv operation")
    with (
        pytest.raises(
            RunError,
            match=r"rank 1 failed before its part of a collective of torch arrived: it has been silent for 0\.2 s",
        ),
        guard.guarded(),
    ):
        raise RunError("stage 0 failed in forward", stage=0, microbatch=0) from late


def test_a_disagreement_that_all_ranks_raise_is_no_failure() -> None:
    guard, ended = guard_of(HashStore(), 0)
    with pytest.raises(Disagreement), guard.guarded():
        raise Disagreement("the ranks disagree")
    guard.require_whole()
    assert (ended, guard.board.failed()) == ([], None)


def test_a_disagreement_of_one_copy_blames_no_rank_of_it_later() -> None:
    """Each rank of the copy was told that it had failed itself, before."""
    guard, _ = guard_of(HashStore(), 0)
    guard.ranks = SimpleNamespace(copy=(0,), members=(0, 1))  # type: ignore[assignment]
    with pytest.raises(CopyDisagreement), guard.guarded():
        raise CopyDisagreement("the ranks have different samples")
    with pytest.raises(RunError, match="failed before\n  why    the ranks have different samples\n"):
        guard.require_whole()


def test_an_error_that_all_ranks_are_known_to_raise_is_no_failure() -> None:
    guard, ended = guard_of(HashStore(), 0)

    def call(*, is_common: bool) -> None:
        with guard.guarded():
            error = InputError("no such input")
            guard.common = error if is_common else guard.common
            raise error

    with pytest.raises(InputError):
        call(is_common=True)
    guard.require_whole()
    assert (ended, guard.board.failed()) == ([], None)
    with pytest.raises(InputError):
        call(is_common=False)
    assert ended == [0]


def test_a_rank_that_is_found_lost_is_posted() -> None:
    guard, _ = guard_of(HashStore(), 0)
    lost = FailureReport(1, "it was killed")
    with pytest.raises(RunError, match="rank 1 failed"), guard.guarded():
        raise RankLost(lost, is_posted=False)
    assert guard.board.failed() == lost == guard.lost
