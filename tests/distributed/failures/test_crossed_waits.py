"""Waits of ranks in several pipelines, in one process; test_absences.py has ranks that are processes."""

from __future__ import annotations

from threading import get_ident
from unittest.mock import patch

import pytest
from torch.distributed import HashStore

from pipecompile.distributed.failures import crossed_waits
from pipecompile.distributed.failures.board_watch import PATIENCE, PendingWait
from pipecompile.distributed.failures.crossed_waits import CrossedWaits
from pipecompile.distributed.failures.failure_report import RankLost

HERE = PendingWait(0, "a row")


def later(waits: CrossedWaits, awaited: int) -> None:
    """Check a wait twice, with so much time between that it lasts for long."""
    with patch.object(crossed_waits, "awake", side_effect=[0.0, PATIENCE]):
        waits.check(awaited)
        waits.check(awaited)


def test_waits_for_each_other_in_two_pipelines_are_told_on_both_ranks() -> None:
    store = HashStore()
    first, second = CrossedWaits(store, 4, 1), CrossedWaits(store, 5, 2)
    first.note(5, HERE)
    second.note(4, HERE)
    with pytest.raises(RankLost, match="rank 5 waits for rank 4 in a call of number 2, while rank 4 waits in number 1"):
        later(first, 5)
    first.clear()  # the other rank is still to find it
    with pytest.raises(RankLost, match="rank 4 waits for rank 5 in a call of number 1, while rank 5 waits in number 2"):
        later(second, 4)
    CrossedWaits(store, 4, 3)
    assert second.found(4) is None


def test_waits_in_a_circle_of_three_ranks_are_found() -> None:
    store = HashStore()
    waits = [CrossedWaits(store, rank, number) for rank, number in ((4, 1), (5, 1), (6, 2))]
    for each, awaited in zip(waits, (5, 6, 4), strict=True):
        each.note(awaited, HERE)
    lost = waits[0].found(5)
    assert lost is not None
    assert "rank 5 waits for rank 6 in a call of number 1, and rank 6 waits for rank 4 in a call of number 2" in str(
        lost
    )


def test_waits_in_one_pipeline_or_that_end_or_of_other_threads_are_not_told() -> None:
    store = HashStore()
    first, second, alike = (CrossedWaits(store, rank, number) for rank, number in ((4, 1), (5, 2), (5, 1)))
    first.note(5, HERE)
    alike.note(4, HERE)
    later(first, 5)
    alike.clear()
    second.note(4, PendingWait(0, "a row", thread=get_ident() + 1))  # that thread may wait for long: another one steps
    later(first, 5)
    second.note(4, HERE)
    with patch.object(crossed_waits, "awake", side_effect=[0.0, 0.0]):
        first.check(5)
        second.clear()
        second.note(4, HERE)  # another wait
        first.check(5)
