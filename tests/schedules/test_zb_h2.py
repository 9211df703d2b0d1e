from __future__ import annotations

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from schedule_times import DEVICES, TIMES, makespan, rows

from pipecompile.ir import Kind
from pipecompile.ir.in_flight import in_flight
from pipecompile.schedules import build_schedule
from pipecompile.simulation.simulator import simulate


def test_rows() -> None:
    assert rows(build_schedule("zb-h2", 3, 5)) == [
        "0F0 0F1 0F2 0F3 0F4 0I0 0W0 0I1 0W1 0I2 0W2 0I3 0W3 0I4 0W4",
        "1F0 1F1 1F2 1I0 1F3 1I1 1F4 1I2 1W0 1I3 1W1 1I4 1W2 1W3 1W4",
        "2F0 2I0 2F1 2I1 2F2 2I2 2F3 2I3 2F4 2I4 2W0 2W1 2W2 2W3 2W4",
    ]


@settings(max_examples=40, deadline=None)
@given(p=DEVICES, more=st.integers(0, 9), times=TIMES)
def test_no_device_is_idle_within_its_span(p: int, more: int, times: tuple[float, float, float]) -> None:
    f, i, w = times
    assume(i <= min(f, w))
    m = 2 * p - 1 + more
    schedule = build_schedule("zb-h2", p, m)
    assert makespan(schedule, times) == pytest.approx(m * sum(times) + (p - 1) * f)
    timeline = simulate(schedule)
    assert timeline.spans_of_devices == (3.0 * m,) * p
    assert max(timeline.peak_in_flight) <= 2 * p - 1
    assert in_flight(schedule.rows, range(p), until=Kind.INPUT_GRAD) == tuple(range(2 * p - 1, 0, -2))
