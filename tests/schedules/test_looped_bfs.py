from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_times import CHUNKS, DEVICES, TIMES, makespan, rows

from pipecompile.ir.in_flight import in_flight
from pipecompile.schedules import build_schedule


def test_rows() -> None:
    assert rows(build_schedule("looped-bfs", 4, 3, n_devices=2)) == [
        "0F0 0F1 0F2 2F0 2F1 2F2 2B0 2B1 2B2 0B0 0B1 0B2",
        "1F0 1F1 1F2 3F0 3F1 3F2 3B0 3B1 3B2 1B0 1B1 1B2",
    ]


@settings(max_examples=25, deadline=None)
@given(p=DEVICES, v=CHUNKS, more=st.integers(0, 9), times=TIMES)
def test_several_stages_divide_the_bubble(p: int, v: int, more: int, times: tuple[float, float, float]) -> None:
    m = p + more
    schedule = build_schedule("looped-bfs", p * v, m, n_devices=p)
    assert makespan(schedule, times) == pytest.approx(m * sum(times) + (p - 1) * sum(times) / v)
    peaks = in_flight(schedule.rows, schedule.placement)
    assert peaks == (m,) * p
