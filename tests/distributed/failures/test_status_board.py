"""Boards of several ranks of one process, on a store in memory."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from time import monotonic, sleep

import pytest
from torch.distributed import HashStore

from pipecompile.distributed.failures import status_board
from pipecompile.distributed.failures.failure_report import AwaitedMessage, Disagreement, FailureReport, RankLost
from pipecompile.distributed.failures.status_board import StatusBoard
from pipecompile.parameters.save_attendance import RankMissing

MEMBERS = (4, 5, 7)


def boards(timeout: float = 5.0) -> list[StatusBoard]:
    store = HashStore()
    return [StatusBoard(store, MEMBERS, rank, timeout) for rank in MEMBERS]


def together(calls: list[object]) -> list[object]:
    """The results of calls that run at the same time, exceptions among them."""

    def result(call: object) -> object:
        try:
            return call()  # type: ignore[operator]
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(result, calls))


def test_every_member_gets_the_texts_of_all_in_their_order() -> None:
    texts = ["a", "two\nlines", ""]
    ranks = boards()
    for _ in range(2):
        calls = [lambda b=b, t=t: b.all_gather_text("plan", t) for b, t in zip(ranks, texts, strict=True)]
        assert together(calls) == [texts] * 3


def test_equal_texts_agree() -> None:
    assert together([lambda b=b: b.agree("graph", "same") for b in boards()]) == [None] * 3


def test_ranks_that_disagree_all_raise_the_same_error() -> None:
    errors = together([lambda b=b: b.agree("graph", f"{b.rank // 6} layers") for b in boards()])
    assert all(isinstance(error, Disagreement) for error in errors)
    assert len({str(error) for error in errors}) == 1
    assert "the ranks disagree about the graph\n  where  ranks 4, 5: 0 layers; rank 7: 1 layers" in str(errors[0])


def test_ranks_that_exchange_different_topics_disagree() -> None:
    errors = together([lambda b=b: b.all_gather_text("plan" if b.rank < 7 else "graph", "") for b in boards()])
    assert all("the ranks disagree about what to do next" in str(error) for error in errors)


def test_a_member_that_does_not_come_is_lost_after_the_timeout() -> None:
    with pytest.raises(RankLost, match="did not take part") as caught:
        boards(timeout=0.05)[0].agree("graph", "same")
    assert caught.value.report.rank == 5
    assert not caught.value.is_posted


def test_a_member_that_waits_for_another_itself_is_not_blamed() -> None:
    """Rank 5 was, before, if rank 7 stopped in the midst of a call of the two."""
    first, second, _ = boards(timeout=0.05)
    second.post_wait(7, "h#0")
    with pytest.raises(RankLost) as caught:
        first.agree("graph", "same")
    text = str(caught.value.report.error())
    assert text == "rank 7 failed before an exchange: it did not send h#0 within 0.05 s, for which rank 5 waits"
    second.post_wait(4, "h#1")
    with pytest.raises(RankLost, match="did not take part") as caught:
        first.agree("graph", "same")
    assert caught.value.report.rank == 5


def test_an_exchange_ends_when_a_rank_fails() -> None:
    first, second, _ = boards()
    report = FailureReport(5, "ValueError: no")
    second.post_failure(report)
    with pytest.raises(RankLost) as caught:
        first.agree("graph", "same")
    assert caught.value.report == report
    assert caught.value.is_posted


def test_the_first_report_stays() -> None:
    first, second, third = boards()
    assert first.failed() is None
    reports = FailureReport(4, "a"), FailureReport(5, "b")
    assert first.post_failure(reports[0]) == reports[0]
    assert second.post_failure(reports[1]) == reports[0]
    assert third.failed() == reports[0]
    with pytest.raises(RankLost, match="a"):
        third.check()


def test_a_failing_rank_waits_for_its_readers() -> None:
    first, second, third = boards()
    second.confirm_read()
    start = monotonic()
    with ThreadPoolExecutor() as pool:
        pool.submit(lambda: (sleep(0.1), third.confirm_read()))
        first.wait_for_readers()
    assert 0.1 <= monotonic() - start < 4


def test_a_failing_rank_does_not_wait_longer_than_the_timeout() -> None:
    start = monotonic()
    boards(timeout=0.1)[0].wait_for_readers()
    assert monotonic() - start < 2


def begun_by_the_first(monkeypatch: pytest.MonkeyPatch, patience: float) -> list[StatusBoard]:
    """Return boards in one run, in which ranks 4 and 5, but not 7, have begun an exchange."""
    monkeypatch.setattr(status_board, "PATIENCE", patience)
    every = boards(timeout=0.02)
    for board in every:
        board.begin()
    for board in every[:2]:
        with pytest.raises(RankLost, match="did not take part"):
            board.agree("program", "text")
    return every


def test_a_rank_that_waits_for_one_in_an_exchange_without_it_was_asked_for_something_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Within a run; exchanges of another run do not count."""
    first, _, third = begun_by_the_first(monkeypatch, 0.0)
    third.check(5)
    with pytest.raises(RankLost, match="it and rank 7 were asked for different things: it exchanges program") as caught:
        third.check(5)
    assert caught.value.report.rank == 5
    first.check(5)  # both are in it
    first.check(5)
    third.begin()
    third.check(5)
    third.check(5)


def test_a_wait_for_a_rank_that_waits_for_one_in_an_exchange_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, third = begun_by_the_first(monkeypatch, 0.0)
    first.post_wait(5, "h#0")
    third.check(4)
    with pytest.raises(RankLost, match="exchanges program") as caught:
        third.check(4)
    assert caught.value.report.rank == 5
    second.post_wait(7, "h#1")
    third.check(4)  # rank 7 itself is late


def test_ranks_that_are_ahead_harm_no_rank_that_waits_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks of a copy that is late wait for one another. They failed after half a second, before."""
    first, second, third = boards()
    monkeypatch.setattr(status_board, "PATIENCE", 0.0)
    for board in (first, second, third):
        board.begin()
    first.timeout = 0.02
    with pytest.raises(RankLost, match="did not take part"):
        first.agree("program", "text")
    for _ in range(3):
        third.check()
        third.check(5)


def test_a_message_of_a_rank_that_is_ahead_has_time_to_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    *_, third = begun_by_the_first(monkeypatch, 60.0)
    for _ in range(3):
        third.check(5)


def test_a_posted_wait_is_read_until_it_is_cleared() -> None:
    first, second, _ = boards()
    first.begin()
    first.post_wait(5, "h#0")
    assert second.wait_of(4) == AwaitedMessage(5, "h#0", first.step)
    first.clear_wait()
    assert second.wait_of(4) is None
    assert second.wait_of(7) is None


def test_the_root_of_a_wait_is_the_rank_that_does_not_wait() -> None:
    first, second, third = boards()
    assert first.root_of_wait(5, "h#0") == (5, "h#0")
    second.post_wait(7, "g#1")
    assert first.root_of_wait(5, "h#0") == (7, "g#1")
    third.post_wait(4, "x#2")
    assert first.root_of_wait(5, "h#0") == (4, "x#2")  # a cycle through the rank itself
    third.post_wait(5, "y#2")
    assert first.root_of_wait(5, "h#0") == (5, "y#2")  # a cycle of others


def test_of_two_steps_the_earlier_counts() -> None:
    """Rank 4 waits in step 3 for a gradient of rank 5, and this rank is in step 4; a wait for another rank does not count."""
    first, _, third = boards()
    third.step, first.step = 4, 3
    first.post_wait(5, "h'1#1")
    third.post_wait(5, "h#0")
    assert third.awaited_from(5, "h#0") == {"h'1#1"}
    third.step = 3
    third.post_wait(5, "h#3")
    assert third.awaited_from(5, "own") == {"h'1#1", "h#3", "own"}
    first.post_wait(7, "g#0")
    third.clear_wait()
    assert third.awaited_from(5, "own") == {"own"}


def test_an_exception_outside_all_calls_is_posted_unless_all_raise_it() -> None:
    first, second, third = boards(timeout=0.1)
    assert not first.report_outside(Disagreement("all raise this"))
    assert not first.report_outside(RankMissing("rank 5 did not come to a save"))
    assert second.failed() is None
    assert second.report_outside(ValueError("bad record 7"))
    assert not third.report_outside(ValueError("later"))
    report = first.failed()
    assert report is not None
    assert str(report.error()).startswith("rank 5 failed outside a step: ValueError: bad record 7")


def test_a_member_whose_process_has_ended_is_lost_before_the_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status_board, "POLL", 0.01)
    first, *_ = boards(timeout=60.0)
    monkeypatch.setattr(status_board, "has_ended", lambda process: bool(process))
    with pytest.raises(RankLost, match="its process has ended"):
        first.agree("graph", "same")
