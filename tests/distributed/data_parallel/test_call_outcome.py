"""The outcome of a call: all ranks have it, whoever writes it first."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from pipecompile.distributed.data_parallel.call_outcome import CallOutcome
from pipecompile.distributed.failures.failure_report import FailureReport, RankLost
from pipecompile.distributed.failures.status_board import StatusBoard

LOST = RankLost(FailureReport(3, "it was killed"), is_posted=False)


class Group:
    """A group in which a rank may be lost. `calls` counts the collectives."""

    def __init__(self, lost: RankLost | None = None) -> None:
        self.size, self.lost, self.calls = 2, lost, 0

    def max(self, tensor: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.lost is not None:
            raise self.lost
        return tensor


def outcome_of(store: Any, rank: int, lost: RankLost | None = None, pipeline: Any = None) -> CallOutcome:
    board = StatusBoard(store, range(4), rank, 1.0)
    ranks = SimpleNamespace(copy=(0, 1) if rank < 2 else (2, 3), members=range(4), rank=rank)
    communicator: Any = SimpleNamespace(board=board, ranks=ranks)
    copies: Any = Group(lost)
    return CallOutcome(communicator, pipeline or Group(), copies)


def test_a_call_that_one_rank_has_written_as_done_counts_where_a_failure_is_met_later() -> None:
    store = HashStore()
    outcome_of(store, 0).agree(in_copy=False)
    late = outcome_of(store, 1, LOST)
    late.agree(in_copy=False)
    report = late._communicator.board.failed()
    assert report is not None
    assert report.rank == 3  # for the next call


def test_a_call_that_one_rank_has_written_as_failed_is_undone_on_all() -> None:
    store = HashStore()
    for lost in (LOST, None, LOST):
        with pytest.raises(RankLost, match="it was killed") as caught:
            outcome_of(store, 0, lost).agree(in_copy=False)
        assert caught.value.report.rank == 3


def test_calls_of_copies_are_apart_and_old_outcomes_are_deleted() -> None:
    store: Any = HashStore()
    first = outcome_of(store, 0)
    board, ranks, pipeline = first._communicator.board, first._communicator.ranks, Group()
    first = CallOutcome(first._communicator, pipeline, Group(LOST))  # type: ignore[arg-type]
    keys = []
    for step in range(3):
        board.begin(in_copy=True)
        first.agree(in_copy=True)  # without the other copies
        keys.append(f"outcome/{min(ranks.copy)}/{step + 1}")
    assert pipeline.calls == 3
    assert [store.check([key]) for key in keys] == [False, False, True]
    with pytest.raises(RankLost):
        first.agree(in_copy=False)
