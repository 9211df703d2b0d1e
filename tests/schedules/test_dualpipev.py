from __future__ import annotations

import pytest
from schedule_times import rows

from pipecompile.schedules import build_schedule
from pipecompile.simulation.simulator import simulate


def test_rows() -> None:
    assert rows(build_schedule("dualpipev", 4, 3)) == [
        "0F0 0F1 0F2 3F0 3I0 3W0 3F1 3B1 3F2 0B0 3B2 0B1 0I2 0W2",
        "1F0 2F0 1F1 2F1 1F2 2B0 2F2 1B0 2B1 1B1 2B2 1B2",
    ]


@pytest.mark.parametrize("p", range(1, 9))
@pytest.mark.parametrize("more", [0, 1, 5])
def test_makespan_and_memory_at_equal_times(p: int, more: int) -> None:
    m = 2 * p + more
    timeline = simulate(build_schedule("dualpipev", 2 * p, m), forward=0.5, input_grad=0.5, weight_grad=0.5)
    assert timeline.makespan == 3 * m + (p - 1) / 2
    assert max(timeline.peak_in_flight) <= p + 0.5


def test_few_micro_batches_keep_the_order_of_many() -> None:
    few, many = (build_schedule("dualpipev", 6, m) for m in (2, 6))
    assert few.rows == tuple(tuple(a for a in row if a.microbatch < 2) for row in many.rows)
