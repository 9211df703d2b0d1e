from __future__ import annotations

import pytest
from schedule_times import makespan, rows

from pipecompile.ir.in_flight import in_flight
from pipecompile.schedules import build_schedule


def test_rows() -> None:
    assert rows(build_schedule("ooo-backprop", 3, 3, n_devices=3)) == [
        "0F0 0F1 0F2 0I0 0I1 0I2 0W0 0W1 0W2",
        "1F0 1F1 1F2 1I0 1I1 1I2 1W0 1W1 1W2",
        "2F0 2F1 2F2 2I0 2I1 2I2 2W0 2W1 2W2",
    ]


@pytest.mark.parametrize(("p", "m"), [(1, 3), (2, 2), (3, 5), (4, 8), (6, 16), (8, 16)])
def test_makespan_and_memory(p: int, m: int) -> None:
    schedule = build_schedule("ooo-backprop", p, m)
    times = (1.0, 0.75, 0.5)
    assert makespan(schedule, times) == m * sum(times) + (p - 1) * 1.75
    assert in_flight(schedule.rows, schedule.placement) == (m,) * p
