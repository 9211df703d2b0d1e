"""The agreement on the copies that go on, of ranks that are threads."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import HashStore

from pipecompile.distributed.data_parallel.ranks_left import agreed_copies, copies_left, leave
from pipecompile.distributed.failures import status_board
from pipecompile.distributed.failures.failure_report import FailureReport
from pipecompile.distributed.failures.status_board import StatusBoard
from pipecompile.distributed.protocol import ENDED

COPIES = ((0, 1), (2, 3), (4, 5))


def agreed(staying: dict[int, float], failed: int, prepare: Any = None, timeout: float = 5.0) -> set[tuple[int, ...]]:
    """Return what ranks agree on of which each comes after some seconds."""
    store = HashStore()
    boards = {rank: StatusBoard(store, range(6), rank, timeout) for rank in range(6)}
    if prepare is not None:
        prepare(boards)
    mesh: Any = SimpleNamespace(copies=COPIES, left=(0, 1, 2))

    def come(rank: int) -> tuple[int, ...]:
        status_board.sleep(staying[rank])
        return copies_left(boards[rank], mesh, FailureReport(failed, "it was killed"))

    with ThreadPoolExecutor(6) as pool:
        return {*pool.map(come, staying)}


@pytest.fixture(autouse=True)
def no_process_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status_board, "has_ended", lambda _: False)


def test_all_ranks_of_the_other_copies_go_on() -> None:
    assert agreed({0: 0.0, 1: 0.3, 4: 0.0, 5: 0.1}, failed=3) == {(0, 2)}


def test_a_copy_of_which_a_rank_leaves_or_ends_is_lost_as_well() -> None:
    assert agreed({0: 0.0, 1: 0.0, 4: 0.0}, 3, lambda boards: leave(boards[5])) == {(0,)}

    def end(boards: dict[int, StatusBoard]) -> None:
        boards[4].store.set(ENDED.at(4), "its script has ended")

    assert agreed({0: 0.0, 1: 0.0, 5: 0.0}, 3, end) == {(0,)}


def test_a_rank_that_posts_its_own_failure_does_not_go_on() -> None:
    def fail(boards: dict[int, StatusBoard]) -> None:
        boards[3].post_failure(FailureReport(3, "ValueError: bad data"))
        boards[4].post_failure(FailureReport(4, "ValueError: bad data"))  # the second report is not posted

    assert agreed({0: 0.0, 1: 0.0, 5: 0.0}, 3, fail) == {(0,)}


def test_a_rank_that_says_nothing_is_waited_for_until_the_timeout() -> None:
    assert agreed({0: 0.0, 1: 0.0, 4: 0.0}, failed=3, timeout=1.5) == {(0,)}
    assert agreed({0: 0.0, 2: 0.0}, failed=5, timeout=1.0) == {()}


def test_what_is_agreed_stays() -> None:
    board = StatusBoard(HashStore(), (0, 2), 0, 0.5)
    mesh: Any = SimpleNamespace(copies=((0,), (2,)), left=(0, 1))
    assert agreed_copies(board) is None
    assert copies_left(board, mesh, FailureReport(2, "it was killed")) == (0,)
    late = StatusBoard(board.store, (0, 2), 2, 0.5)
    assert copies_left(late, mesh, FailureReport(0, "it has been silent")) == (0,)
    assert agreed_copies(late) == (0,)
