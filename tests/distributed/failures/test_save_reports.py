from __future__ import annotations

import pytest
from torch.distributed import HashStore

from pipecompile.distributed.failures import status_board
from pipecompile.distributed.failures.failure_report import FailureReport
from pipecompile.distributed.failures.save_reports import SaveReports
from pipecompile.distributed.failures.status_board import StatusBoard
from pipecompile.distributed.protocol import ENDED


def test_a_board_says_what_its_members_did(monkeypatch: pytest.MonkeyPatch) -> None:
    store = HashStore()
    board, second, third = (StatusBoard(store, (4, 5, 7), rank, 1.0) for rank in (4, 5, 7))
    reports = SaveReports(board)
    assert (reports.failure(), reports.ended(5), reports.waits_for(5)) == ("", "", None)
    second.post_wait(7, "g#0")
    third.post_wait(7, "connections")  # what a rank posts that waits for nobody in particular
    store.set(ENDED.at(7), "its script has ended")
    monkeypatch.setattr(status_board, "has_ended", lambda _: False)
    assert [reports.waits_for(rank) for rank in (5, 7, 6)] == [7, None, None]
    assert [reports.ended(rank) for rank in (5, 7, 6)] == ["", "its script has ended", ""]
    third.post_failure(FailureReport(7, "ValueError: bad record", action="outside a step"))
    assert reports.failure() == "rank 7 failed outside a step: ValueError: bad record"
