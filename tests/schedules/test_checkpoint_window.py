from __future__ import annotations

import pytest
from schedule_times import rows

from pipecompile.ir import Kind
from pipecompile.schedules import build_schedule
from pipecompile.simulation.simulator import simulate


def test_rows() -> None:
    assert rows(build_schedule("checkpoint-window", 3, 5, n_devices=3)) == [
        "0F0 0F1 0F2 0B0 0F3 0B1 0F4 0R2 0B2 0B3 0B4",
        "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1F4 1B3 1B4",
        "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3 2F4 2B4",
    ]


@pytest.mark.parametrize(("p", "m"), [(1, 3), (2, 2), (3, 5), (4, 8), (6, 16), (8, 16)])
def test_makespan_and_memory(p: int, m: int) -> None:
    timeline = simulate(build_schedule("checkpoint-window", p, m), saved_bytes=1.0)
    assert 3 * (m + p - 1) <= timeline.makespan <= 3 * (m + p - 1) + m
    assert max(timeline.peak_memory) <= (p + 1) // 2 + 1


def test_the_last_half_of_the_stages_recomputes_nothing() -> None:
    schedule = build_schedule("checkpoint-window", 6, 12)
    recomputed = [[a.microbatch for a in row if a.kind is Kind.RECOMPUTE] for row in schedule.rows]
    assert recomputed == [[3, 4, 5, 9, 10, 11], [3, 4, 8, 9], [3, 7, 11], [], [], []]
