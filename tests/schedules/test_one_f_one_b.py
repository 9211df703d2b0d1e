from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_times import DEVICES, TIMES, makespan

from pipecompile.ir.in_flight import in_flight
from pipecompile.schedules import build_schedule


def test_warm_up_then_pairs_then_the_backwards_that_are_left() -> None:
    assert build_schedule("1f1b", 3, 4).to_csv().splitlines() == [
        "0F0,0F1,0F2,0B0,0F3,0B1,0B2,0B3",
        "1F0,1F1,1B0,1F2,1B1,1F3,1B2,1B3",
        "2F0,2B0,2F1,2B1,2F2,2B2,2F3,2B3",
    ]


def test_fewer_microbatches_than_stages() -> None:
    assert build_schedule("1f1b", 4, 2).to_csv().splitlines() == [
        "0F0,0F1,0B0,0B1",
        "1F0,1F1,1B0,1B1",
        "2F0,2F1,2B0,2B1",
        "3F0,3B0,3F1,3B1",
    ]


@settings(max_examples=25, deadline=None)
@given(p=DEVICES, m=st.integers(1, 12), times=TIMES)
def test_makespan_and_memory(p: int, m: int, times: tuple[float, float, float]) -> None:
    schedule = build_schedule("1f1b", p, m)
    assert makespan(schedule, times) == pytest.approx((m + p - 1) * sum(times))
    assert in_flight(schedule.rows, schedule.placement) == tuple(min(m, most) for most in range(p, 0, -1))
