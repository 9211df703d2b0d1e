from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_times import DEVICES, TIMES, makespan, rows

from pipecompile.ir.in_flight import in_flight
from pipecompile.schedules import build_schedule
from pipecompile.simulation.simulator import simulate


def test_rows() -> None:
    assert rows(build_schedule("eager-1f1b", 3, 4)) == [
        "0F0 0F1 0F2 0F3 0B0 0B1 0B2 0B3",
        "1F0 1F1 1F2 1B0 1F3 1B1 1B2 1B3",
        "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3",
    ]


@settings(max_examples=25, deadline=None)
@given(p=DEVICES, m=st.integers(1, 12), times=TIMES)
def test_makespan_and_memory(p: int, m: int, times: tuple[float, float, float]) -> None:
    schedule = build_schedule("eager-1f1b", p, m)
    assert makespan(schedule, times) == pytest.approx((m + p - 1) * sum(times))
    assert in_flight(schedule.rows, schedule.placement) == tuple(min(m, most) for most in range(2 * p - 1, 0, -2))


@settings(max_examples=15, deadline=None)
@given(p=st.integers(2, 6), m=st.integers(1, 12))
def test_transfers_of_half_a_backward_are_hidden(p: int, m: int) -> None:
    assert simulate(build_schedule("eager-1f1b", p, m), transfer=1.0).makespan == 3 * (m + p - 1) + 2 * (p - 1)
    assert simulate(build_schedule("1f1b", p, m), transfer=1.0).makespan >= 3 * (m + p - 1) + 2 * (p - 1)
