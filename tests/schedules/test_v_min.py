from __future__ import annotations

import pytest
from schedule_times import rows

from pipecompile.schedules import build_schedule
from pipecompile.simulation.simulator import simulate


def test_rows() -> None:
    assert rows(build_schedule("v-min", 4, 3)) == [
        "0F0 0F1 3F0 3I0 3W0 0I0 0F2 3F1 3I1 0W0 3W1 0I1 0W1 3F2 3I2 3W2 0I2 0W2",
        "1F0 2F0 2I0 1I0 1F1 2F1 1W0 2W0 2I1 1I1 1F2 2F2 1W1 2W1 2I2 1I2 1W2 2W2",
    ]


@pytest.mark.parametrize("p", range(1, 9))
@pytest.mark.parametrize("more", [0, 1, 5])
def test_makespan_and_memory_at_equal_times(p: int, more: int) -> None:
    m = 2 + more
    timeline = simulate(build_schedule("v-min", 2 * p, m), forward=0.5, input_grad=0.5, weight_grad=0.5)
    assert timeline.makespan == 3 * m + _beyond(p)
    assert max(timeline.peak_in_flight) <= (p + 1) // 3 + 1


def _beyond(p: int) -> float:
    if p == 1:
        return 0.0
    return (4 * p - 5) / 2 if p % 3 else (4 * p - 7) / 2
