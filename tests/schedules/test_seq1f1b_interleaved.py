from __future__ import annotations

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from schedule_times import CHUNKS, DEVICES, TIMES, makespan, rows

from pipecompile.ir import Schedule
from pipecompile.ir.in_flight import in_flight
from pipecompile.schedules import build_schedule
from pipecompile.schedules.rounds import microbatch_rounds
from pipecompile.simulation.simulator import simulate
from pipecompile.verifiers import verify


def test_rows() -> None:
    assert rows(build_schedule("seq1f1b-interleaved", 4, 2, n_devices=2, n_slices=2)) == [
        "0F0.0 0F0.1 2F0.0 2F0.1 0F1.0 0F1.1 2B0.1 2F1.0 2B0.0 2F1.1 0B0.1 0B0.0 2B1.1 2B1.0 0B1.1 0B1.0",
        "1F0.0 1F0.1 3F0.0 3F0.1 3B0.1 1F1.0 3B0.0 1F1.1 1B0.1 3F1.0 1B0.0 3F1.1 3B1.1 3B1.0 1B1.1 1B1.0",
    ]


def test_one_slice_is_the_interleaved_schedule() -> None:
    for p, v, m in ((2, 2, 8), (3, 2, 7), (4, 3, 9)):
        interleaved = build_schedule("interleaved", p * v, m, n_devices=p)
        assert build_schedule("seq1f1b-interleaved", p * v, m, n_devices=p, n_slices=1) == interleaved


@settings(max_examples=50, deadline=None)
@given(p=DEVICES, v=CHUNKS, m=st.integers(1, 8), k=st.integers(1, 6), times=TIMES)
def test_makespan_and_memory(p: int, v: int, m: int, k: int, times: tuple[float, float, float]) -> None:
    schedule = build_schedule("seq1f1b-interleaved", p * v, m, n_devices=p, n_slices=k)
    verify(schedule)
    assert Schedule.from_csv(schedule.to_csv()) == schedule
    assume(m * k >= p)
    assert makespan(schedule, times) == pytest.approx((m + (p - 1) / (v * k)) * sum(times))
    longest = len(microbatch_rounds(m, -(-p // k))[0]) * k
    most = ((v - 1) * longest + k + (2 if v > 1 else 1) * (p - 1 - d) for d in range(p))
    assert in_flight(schedule.rows, schedule.placement) == tuple(min(m * k * v, each) / v for each in most)


def test_with_many_slices_the_first_device_holds_little_more_than_its_part_of_one_micro_batch() -> None:
    """As SlimPipe: a share of 1/P of the layers, and 2 (P - 1) slices of a stage."""
    p, v, k = 4, 2, 16
    schedule = build_schedule("seq1f1b-interleaved", p * v, 4, n_devices=p, n_slices=k)
    timeline = simulate(schedule, saved_bytes=1.0 / (p * v))
    assert timeline.peak_memory[0] == pytest.approx((1 + 2 * (p - 1) / (v * k)) / p)
