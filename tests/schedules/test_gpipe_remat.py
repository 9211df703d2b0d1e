from __future__ import annotations

import pytest
from schedule_times import rows

from pipecompile.schedules import build_schedule
from pipecompile.simulation.simulator import simulate


def test_rows() -> None:
    assert rows(build_schedule("gpipe-remat", 3, 3, n_devices=3)) == [
        "0F0 0F1 0F2 0R0 0B0 0R1 0B1 0R2 0B2",
        "1F0 1F1 1F2 1R0 1B0 1R1 1B1 1R2 1B2",
        "2F0 2F1 2F2 2R0 2B0 2R1 2B1 2R2 2B2",
    ]


@pytest.mark.parametrize(("p", "m"), [(1, 3), (2, 2), (3, 5), (4, 8), (6, 16), (8, 16)])
def test_makespan_and_memory(p: int, m: int) -> None:
    schedule = build_schedule("gpipe-remat", p, m)
    timeline = simulate(schedule, forward=1.0, input_grad=0.75, weight_grad=0.5, saved_bytes=8.0, recipe_bytes=1.0)
    assert timeline.makespan == (m + p - 1) * 2.25 + m
    assert timeline.peak_memory == (8.0 + m,) * p
