"""Rows between ranks that are threads."""

from __future__ import annotations

import pytest

from pipecompile.distributed.agreement.call_rows import CallRows
from pipecompile.distributed.failures.failure_report import RankLost
from tests.distributed.rank_threads import ThreadCommunicator, run_communicators


def test_rows_come_in_order_with_zeros_behind_them() -> None:
    def run(communicator: ThreadCommunicator) -> list[list[int]]:
        communicator.connect()
        rows, peer = CallRows(communicator, 3), 1 - communicator.ranks.index
        received = []
        for number in range(5):
            if number % 2:
                rows.expect([peer])
                rows.expect([peer])
            rows.send(peer, [communicator.rank, number, -1 << 63][: 1 + number % 3])
            received.append(rows.receive(peer, "a row"))
        rows.flush()
        return received

    of_10, of_11 = ([[r, 0, 0], [r, 1, 0], [r, 2, -1 << 63], [r, 0, 0], [r, 4, 0]] for r in (10, 11))
    of_10[3] = [10, 0, 0]
    of_11[3] = [11, 0, 0]
    assert run_communicators(2, run) == [of_11, of_10]


def test_a_row_that_cannot_come_is_told_when_it_is_received() -> None:
    def run(communicator: ThreadCommunicator) -> str:
        communicator.connect()
        rows, peer = CallRows(communicator, 1), 1 - communicator.ranks.index
        if communicator.ranks.index == 0:
            communicator.channel(peer).abort()
            return ""
        rows.expect([peer])
        with pytest.raises(RankLost) as lost:
            rows.receive(peer, "a row")
        rows.expect([peer])
        return lost.value.report.awaited

    assert run_communicators(2, run)[1] == "a row"
