from __future__ import annotations

import pytest
from schedule_times import rows

from pipecompile.schedules import build_schedule
from pipecompile.simulation.simulator import simulate


def test_rows() -> None:
    assert rows(build_schedule("sequential", 4, 2, n_devices=2)) == [
        "0F0 2F0 2B0 0B0 0F1 2F1 2B1 0B1",
        "1F0 3F0 3B0 1B0 1F1 3F1 3B1 1B1",
    ]


@pytest.mark.parametrize(("p", "m"), [(1, 3), (2, 2), (3, 5), (4, 8), (6, 16), (8, 16)])
def test_makespan_and_memory(p: int, m: int) -> None:
    timeline = simulate(
        build_schedule("sequential", p, m), forward=1.0, input_grad=0.75, weight_grad=0.5, saved_bytes=1.0
    )
    assert timeline.makespan == m * p * 2.25
    assert timeline.peak_memory == (1.0,) * p
