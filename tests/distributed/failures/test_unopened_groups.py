from __future__ import annotations

import pytest

from pipecompile.distributed.failures.status_board import StatusBoard
from pipecompile.distributed.failures.unopened_groups import GroupNotOpened, lost_at_opening, opening
from tests.distributed.failures.test_status_board import boards, together


def lost(board: StatusBoard, *group: int, is_late: bool = True) -> int:
    """Return the rank that is lost by what a rank posts, which does not open a group."""
    failed = GroupNotOpened(group, RuntimeError("wait timeout"), is_late=is_late)
    return board.post_failure(lost_at_opening(board, failed).report).rank


def test_the_rank_that_does_not_come_is_named_on_ranks_that_wait_for_another_one() -> None:
    """Rank 4 was said to be lost: it was the first to report, and rank 5, for which it waits, was waiting, too."""
    first, second, _ = boards()
    assert together([lambda: lost(first, 4, 5), lambda: lost(second, 5, 7)]) == [7, 7]


def test_a_rank_without_resources_is_named_itself() -> None:
    """Out of open files, it named the rank that waited for it."""
    assert lost(boards()[1], 4, 5, is_late=False) == 5


@pytest.mark.parametrize(("timeout", "is_late"), [(0.0, True), (60.0, False)])
def test_an_error_of_torch_names_the_ranks_of_the_group(timeout: float, is_late: bool) -> None:
    with pytest.raises(GroupNotOpened, match="wait timeout") as caught, opening([4, 5], timeout):
        raise RuntimeError("wait timeout\nat line 3")
    assert (str(caught.value), caught.value.ranks, caught.value.is_late) == ("wait timeout", (4, 5), is_late)
