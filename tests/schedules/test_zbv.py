from __future__ import annotations

import pytest
from schedule_times import rows
from torch_generators import multi_order, written

from pipecompile.ir import Schedule
from pipecompile.schedules import build_schedule
from pipecompile.simulation.simulator import simulate


def test_rows() -> None:
    assert rows(build_schedule("zbv", 4, 3)) == [
        "0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 3F2 3I2 3W2 0I1 0W1 0I2 0W2",
        "1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1I1 2I2 1I2 1W1 2W2 1W2",
    ]


@pytest.mark.parametrize("p", range(1, 9))
@pytest.mark.parametrize("more", [0, 1, 5])
def test_makespan_and_memory_at_equal_times(p: int, more: int) -> None:
    m = 2 * p - 1 + more
    timeline = simulate(build_schedule("zbv", 2 * p, m), forward=0.5, input_grad=0.5, weight_grad=0.5)
    assert timeline.makespan == 3 * m + (p - 1) / 2
    assert max(timeline.peak_in_flight) <= p
    assert timeline.spans_of_devices == (3.0 * m,) * p


@pytest.mark.parametrize("m", [1, 2, 3, 4])
def test_few_micro_batches_stay_within_the_memory(m: int) -> None:
    """Fewer than 2 P - 1 are list scheduled."""
    timeline = simulate(build_schedule("zbv", 6, m))
    assert max(timeline.peak_in_flight) <= 3
    assert timeline.makespan <= simulate(build_schedule("gpipe", 6, m, n_devices=3)).makespan


@pytest.mark.parametrize("p", range(2, 8))
def test_few_micro_batches_are_no_slower_than_torch_has_them(p: int) -> None:
    for m in range(p, 2 * p):
        theirs = simulate(Schedule.from_csv(written(multi_order("ScheduleZBVZeroBubble", p, 2, m))))
        ours = simulate(build_schedule("zbv", 2 * p, m))
        assert ours.makespan <= theirs.makespan
        assert max(ours.peak_in_flight) <= max(theirs.peak_in_flight)
