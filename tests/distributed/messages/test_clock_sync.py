"""Ranks as threads of one process, whose clocks differ by hours."""

from __future__ import annotations

from time import perf_counter

import pytest

from pipecompile.distributed.messages import clock_sync
from pipecompile.distributed.messages.clock_sync import gathered_spans, read_clocks
from tests.distributed.rank_threads import ThreadCommunicator, run_communicators

HOUR = 3600.0


def test_the_first_rank_reads_how_far_clocks_are_ahead() -> None:
    def run(communicator: ThreadCommunicator) -> object:
        communicator.connect()
        return read_clocks(communicator, lambda: perf_counter() + HOUR * communicator.ranks.index)

    first, *others = run_communicators(3, run)
    assert others == [(), ()]
    for rank, offset in enumerate(first):
        assert abs(offset.ahead - HOUR * rank) <= offset.error + 1e-9
        assert offset.error < 1.0
    assert (first[0].ahead, first[0].error) == (0.0, 0.0)


def test_the_exchange_with_the_least_error_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock_sync, "_EXCHANGES", 2)
    times = {0: iter([0.0, 10.0, 20.0, 22.0]), 1: iter([107.0, 121.5])}

    def run(communicator: ThreadCommunicator) -> object:
        communicator.connect()
        return read_clocks(communicator, lambda: next(times[communicator.ranks.index]))

    offset = run_communicators(2, run)[0][1]
    assert (offset.ahead, offset.error) == (100.5, 1.0)


def test_every_rank_gets_the_spans_of_all_on_the_first_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    offsets = (clock_sync.ClockOffset(), clock_sync.ClockOffset(HOUR, 0.25))
    exchange = read_clocks
    monkeypatch.setattr(clock_sync, "read_clocks", lambda each: exchange(each) and offsets)

    def run(communicator: ThreadCommunicator) -> object:
        start = HOUR * communicator.ranks.index
        return gathered_spans(communicator, [(device, "F", start, start + 1.0) for device in range(2)])

    for spans, error in run_communicators(2, run):
        assert spans == [(0, "F", 0.0, 1.0), (1, "F", 0.0, 1.0)]
        assert error == 0.25
