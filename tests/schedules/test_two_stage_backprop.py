from __future__ import annotations

import pytest
from schedule_times import makespan, rows

from pipecompile.ir import Kind
from pipecompile.ir.in_flight import in_flight
from pipecompile.schedules import build_schedule


def test_rows() -> None:
    assert rows(build_schedule("2bp", 3, 4, n_devices=3)) == [
        "0F0 0F1 0F2 0I0 0F3 0I1 0W0 0I2 0W1 0I3 0W2 0W3",
        "1F0 1F1 1I0 1F2 1I1 1F3 1I2 1W0 1I3 1W1 1W2 1W3",
        "2F0 2I0 2F1 2I1 2F2 2I2 2F3 2I3 2W0 2W1 2W2 2W3",
    ]


@pytest.mark.parametrize(("p", "m"), [(1, 3), (2, 2), (3, 4), (4, 8), (6, 16), (8, 16)])
def test_makespan_and_memory(p: int, m: int) -> None:
    schedule = build_schedule("2bp", p, m)
    times = (1.0, 0.75, 0.5)
    assert makespan(schedule, times) == m * sum(times) + (p - 1) * 1.25
    assert in_flight(schedule.rows, schedule.placement) == (m,) * p
    assert in_flight(schedule.rows, schedule.placement, until=Kind.INPUT_GRAD) == tuple(range(p, 0, -1))
