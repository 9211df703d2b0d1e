from __future__ import annotations

import pytest
import torch.distributed as dist
from torch.distributed import HashStore

from pipecompile.parameters import save_attendance
from pipecompile.parameters.process_identity import identity
from pipecompile.parameters.save_attendance import SaveAttendance, explain_by


def attendance(monkeypatch: pytest.MonkeyPatch, store: HashStore, rank: int) -> SaveAttendance:
    monkeypatch.setattr(save_attendance, "_PATIENCE", 0.05)
    monkeypatch.setattr(save_attendance, "_REPORTS", set())
    monkeypatch.setattr(save_attendance, "default_store", lambda: store)
    monkeypatch.setattr(dist, "get_rank", lambda: rank)
    monkeypatch.setattr(dist, "get_world_size", lambda: 3)
    return SaveAttendance(1)


def test_ranks_that_did_not_come_or_do_not_answer_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    store = HashStore()
    first = attendance(monkeypatch, store, 0)
    assert first.missing() == "ranks 1, 2 did not come to it"
    second = attendance(monkeypatch, store, 1)
    assert first.missing() == "rank 2 did not come to it"
    attendance(monkeypatch, store, 2)
    assert first.missing() == "ranks 1, 2 did not answer"
    assert second.missing() == "rank 2 did not answer"  # the first has failed for another as well


@pytest.mark.skipif(not identity(), reason="needs /proc")
def test_a_rank_that_has_ended_is_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    store = HashStore()
    first = attendance(monkeypatch, store, 0)
    attendance(monkeypatch, store, 1)
    *place, start = identity().split()
    first.store.set("1", " ".join([*place, str(int(start) - 1)]))
    monkeypatch.setattr(save_attendance, "_PATIENCE", 60.0)
    assert first.missing() == "rank 1 ended"


def test_a_failure_that_was_reported_is_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two copies of a pipeline, one had gone on to the save: the ranks that waited for the failed one were blamed as well."""

    class Board:
        def failure(self) -> str:
            return "rank 2 failed outside a step: ValueError: bad record 7"

    first, board = attendance(monkeypatch, HashStore(), 0), Board()
    explain_by(board)
    assert first.missing() == board.failure()
