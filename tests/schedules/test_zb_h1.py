from __future__ import annotations

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from schedule_times import DEVICES, TIMES, makespan, rows

from pipecompile.ir import Kind
from pipecompile.ir.in_flight import in_flight
from pipecompile.schedules import build_schedule


def test_rows() -> None:
    assert rows(build_schedule("zb-h1", 3, 4)) == [
        "0F0 0F1 0F2 0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3",
        "1F0 1F1 1I0 1F2 1I1 1W0 1F3 1I2 1W1 1I3 1W2 1W3",
        "2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2W2 2W3",
    ]


@settings(max_examples=40, deadline=None)
@given(p=DEVICES, rounds=st.integers(1, 3), times=TIMES)
def test_w_fills_the_bubble(p: int, rounds: int, times: tuple[float, float, float]) -> None:
    f, i, w = times
    assume(w <= min(f, i))
    m = rounds * p
    schedule = build_schedule("zb-h1", p, m)
    assert makespan(schedule, times) == pytest.approx(m * sum(times) + (p - 1) * (f + i - w))
    assert max(in_flight(schedule.rows, schedule.placement)) <= p
    until_input_grad = in_flight(schedule.rows, schedule.placement, until=Kind.INPUT_GRAD)
    assert until_input_grad == tuple(range(p, 0, -1))
