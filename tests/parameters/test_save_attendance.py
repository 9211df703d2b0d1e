from __future__ import annotations

from threading import Timer

import pytest
import torch.distributed as dist
from torch.distributed import HashStore

from pipecompile.parameters import save_attendance
from pipecompile.parameters.process_identity import identity
from pipecompile.parameters.save_attendance import SaveAttendance, explain_by, noted_save


def attendance(monkeypatch: pytest.MonkeyPatch, store: HashStore, rank: int) -> SaveAttendance:
    monkeypatch.setattr(save_attendance, "_PATIENCE", 0.05)
    monkeypatch.setattr(save_attendance, "_REPORTS", set())
    monkeypatch.setattr(save_attendance, "default_store", lambda: store)
    monkeypatch.setattr(dist, "get_rank", lambda: rank)
    return SaveAttendance(1, (0, 1, 2))


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

    first, board = (
        attendance(monkeypatch, HashStore(), 0),
        FakeReports(failed="rank 2 failed outside a step: ValueError: bad record 7"),
    )
    explain_by(board)
    assert first.missing() == board.failed


def test_ranks_that_wait_for_one_that_has_ended_are_not_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 ended before it gathered the state with rank 2, which waited for it: "ranks 1, 2 did not come", without a cause."""
    first, board = attendance(monkeypatch, HashStore(), 0), FakeReports(ends={1: "its script has ended"}, waits={2: 1})
    explain_by(board)
    assert first.missing() == "rank 1 ended: its script has ended"
    board.ends.clear()
    assert first.missing() == "rank 1 did not come to it"
    board.waits[1] = 2  # for each other: neither is first
    assert first.missing() == "ranks 1, 2 did not come to it"


def test_a_cause_that_comes_late_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    first, board = attendance(monkeypatch, HashStore(), 0), FakeReports()
    monkeypatch.setattr(save_attendance, "_PATIENCE", 30.0)
    explain_by(board)
    timer = Timer(0.1, lambda: setattr(board, "failed", "rank 1 failed"))
    timer.start()
    assert first.missing() == "rank 1 failed"


class FakeReports:
    """Reports about ranks, as a board of a pipeline makes them."""

    def __init__(
        self, failed: str = "", ends: dict[int, str] | None = None, waits: dict[int, int] | None = None
    ) -> None:
        self.failed, self.ends, self.waits = failed, ends or {}, waits or {}
        self.notes: list[str] = []

    def failure(self) -> str:
        return self.failed

    def ended(self, rank: int) -> str:
        return self.ends.get(rank, "")

    def waits_for(self, rank: int) -> int | None:
        return self.waits.get(rank)

    def note_save(self, path: str) -> None:
        self.notes.append(path)


def test_a_save_is_noted_while_it_lasts() -> None:
    reports = FakeReports()
    explain_by(reports)
    with noted_save("saved/00000001"):
        assert reports.notes == ["saved/00000001"]
    assert reports.notes == ["saved/00000001", ""]
