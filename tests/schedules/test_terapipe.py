from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_times import CHUNKS, DEVICES, TIMES, makespan

from pipecompile.ir.in_flight import in_flight
from pipecompile.schedules import build_schedule
from pipecompile.verifiers import verify


def test_all_forwards_then_all_backwards_from_the_last_slice() -> None:
    assert build_schedule("terapipe", 2, 2, n_slices=2).to_csv().splitlines() == [
        "0F0.0,0F0.1,0F1.0,0F1.1,0B0.1,0B0.0,0B1.1,0B1.0",
        "1F0.0,1F0.1,1F1.0,1F1.1,1B0.1,1B0.0,1B1.1,1B1.0",
    ]


def test_one_slice_is_gpipe() -> None:
    assert build_schedule("terapipe", 6, 3, n_devices=3, n_slices=1) == build_schedule("gpipe", 6, 3, n_devices=3)


@settings(max_examples=40, deadline=None)
@given(p=DEVICES, v=CHUNKS, m=st.integers(1, 8), k=st.integers(1, 6), times=TIMES)
def test_makespan_and_memory(p: int, v: int, m: int, k: int, times: tuple[float, float, float]) -> None:
    schedule = build_schedule("terapipe", p * v, m, n_devices=p, n_slices=k)
    verify(schedule)
    assert in_flight(schedule.rows, schedule.placement) == (m * k,) * p
    if v == 1 or m * k >= p:
        assert makespan(schedule, times) == pytest.approx((m + (p - 1) / (v * k)) * sum(times))
