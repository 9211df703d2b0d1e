from __future__ import annotations

import pytest
from schedule_times import rows

from pipecompile.schedules import build_schedule
from pipecompile.simulation.simulator import simulate


def test_rows() -> None:
    assert rows(build_schedule("v-two-thirds", 4, 3, n_devices=2)) == [
        "0F0 0F1 0F2 3F0 3I0 3W0 3F1 0I0 3I1 0W0 3W1 0I1 0W1 3F2 3I2 3W2 0I2 0W2",
        "1F0 2F0 1F1 2F1 2I0 1I0 1W0 1F2 2I1 1I1 2W0 2F2 1W1 2W1 2I2 1I2 1W2 2W2",
    ]


@pytest.mark.parametrize("p", range(1, 9))
@pytest.mark.parametrize("rounds", [2, 4])
def test_makespan_and_memory_at_equal_times(p: int, rounds: int) -> None:
    m = rounds * p
    timeline = simulate(build_schedule("v-two-thirds", 2 * p, m), forward=0.5, input_grad=0.5, weight_grad=0.5)
    assert timeline.makespan == 3 * m + (0, 1, 3, 4, 7, 10, 11, 13)[p - 1] / 2
    assert max(timeline.peak_in_flight) <= (4 * p + 5) // 3 / 2
