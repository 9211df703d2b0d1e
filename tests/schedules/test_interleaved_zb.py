from __future__ import annotations

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from schedule_times import CHUNKS, DEVICES, TIMES, makespan, rows

from pipecompile.ir.in_flight import in_flight
from pipecompile.schedules import build_schedule


def test_rows() -> None:
    assert rows(build_schedule("interleaved-zb", 4, 3, n_devices=2)) == [
        "0F0 0F1 0F2 2F0 2F1 2I0 2W0 2F2 2I1 2W1 2I2 2W2 0I0 0W0 0I1 0W1 0I2 0W2",
        "1F0 1F1 1F2 3F0 3I0 3F1 3I1 3W0 3F2 3I2 3W1 1I0 3W2 1I1 1W0 1I2 1W1 1W2",
    ]


@settings(max_examples=40, deadline=None)
@given(p=DEVICES, v=CHUNKS, rounds=st.integers(1, 3), times=TIMES)
def test_w_fills_the_bubble(p: int, v: int, rounds: int, times: tuple[float, float, float]) -> None:
    f, i, w = times
    assume(w <= min(f, i))
    m = rounds * p
    schedule = build_schedule("interleaved-zb", p * v, m, n_devices=p)
    assert makespan(schedule, times) == pytest.approx(m * sum(times) + (p - 1) * (f + i - w) / v)
    assert max(in_flight(schedule.rows, schedule.placement)) <= ((v - 1) * p + p) / v
