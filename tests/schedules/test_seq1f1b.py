from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_times import DEVICES, TIMES, makespan

from pipecompile.errors import ScheduleError
from pipecompile.ir import Schedule
from pipecompile.ir.in_flight import in_flight
from pipecompile.schedules import build_schedule
from pipecompile.simulation.simulator import simulate
from pipecompile.verifiers import verify


def test_warm_up_then_pairs_with_the_last_slice_first() -> None:
    assert build_schedule("seq1f1b", 3, 2, n_slices=2).to_csv().splitlines() == [
        "0F0.0,0F0.1,0F1.0,0F1.1,0B0.1,0B0.0,0B1.1,0B1.0",
        "1F0.0,1F0.1,1F1.0,1B0.1,1F1.1,1B0.0,1B1.1,1B1.0",
        "2F0.0,2F0.1,2B0.1,2F1.0,2B0.0,2F1.1,2B1.1,2B1.0",
    ]


def test_one_slice_is_1f1b_and_four_are_the_default() -> None:
    assert build_schedule("seq1f1b", 4, 6, n_slices=1) == build_schedule("1f1b", 4, 6)
    assert build_schedule("seq1f1b", 4, 6).n_slices == 4
    assert build_schedule("seq1f1b", 4, 6).n_microbatches == 6


@settings(max_examples=50, deadline=None)
@given(p=DEVICES, m=st.integers(1, 8), k=st.integers(1, 6), times=TIMES)
def test_makespan_bubble_and_memory(p: int, m: int, k: int, times: tuple[float, float, float]) -> None:
    schedule = build_schedule("seq1f1b", p, m, n_slices=k)
    verify(schedule)
    assert Schedule.from_csv(schedule.to_csv()) == schedule
    assert makespan(schedule, times) == pytest.approx((m * k + p - 1) * sum(times) / k)
    assert simulate(schedule).bubble == pytest.approx((p - 1) / (m * k + p - 1))
    assert in_flight(schedule.rows, schedule.placement) == tuple(min(m * k, p - 1 - s + k) for s in range(p))


@pytest.mark.parametrize(("p", "m", "k"), [(4, 8, 4), (8, 8, 2), (8, 16, 8), (16, 16, 16)])
def test_it_holds_less_than_1f1b_in_less_time(p: int, m: int, k: int) -> None:
    sliced, whole = (
        simulate(schedule, saved_bytes=1.0)
        for schedule in (build_schedule("seq1f1b", p, m, n_slices=k), build_schedule("1f1b", p, m))
    )
    assert max(sliced.peak_memory) == pytest.approx(1 + (p - 1) / k)
    assert max(whole.peak_memory) == p
    assert sliced.makespan < whole.makespan


@pytest.mark.parametrize("n_slices", [0, -1, 1.5, "2", True])
def test_what_is_no_number_of_slices_is_refused(n_slices: int) -> None:
    with pytest.raises(ScheduleError, match="n_slices is not a whole number of at least 1"):
        build_schedule("seq1f1b", 2, 2, n_slices=n_slices)


def test_more_slices_than_memory_holds_are_refused() -> None:
    with pytest.raises(ScheduleError, match=r"4 stages on 8 micro-batches of 10,000,000 slices are asked for"):
        build_schedule("seq1f1b", 4, 8, n_slices=10_000_000)
    with pytest.raises(ScheduleError, match=r"100 stages on 200,000 micro-batches of 4 slices are asked for"):
        build_schedule("seq1f1b", 100, 200_000)
