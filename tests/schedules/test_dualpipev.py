from __future__ import annotations

import pytest
from schedule_times import rows
from torch_generators import multi_order, written

from pipecompile.ir import Schedule, chain
from pipecompile.schedules import build_schedule
from pipecompile.simulation.simulator import simulate
from pipecompile.verifiers.schedule import schedule_faults


def test_rows() -> None:
    assert rows(build_schedule("dualpipev", 4, 3)) == [
        "0F0 0F1 0F2 3F0 3I0 3W0 3F1 0I0 3I1 0W0 3W1 0I1 0W1 3F2 3I2 3W2 0I2 0W2",
        "1F0 2F0 1F1 2F1 2I0 1I0 1W0 1F2 2I1 1I1 2W0 2F2 1W1 2W1 2I2 1I2 1W2 2W2",
    ]


@pytest.mark.parametrize("p", range(1, 9))
@pytest.mark.parametrize("more", [0, 1, 5])
def test_makespan_and_memory_at_equal_times(p: int, more: int) -> None:
    m = 2 * p + more
    timeline = simulate(build_schedule("dualpipev", 2 * p, m), forward=0.5, input_grad=0.5, weight_grad=0.5)
    assert timeline.makespan == 3 * m + (p - 1) / 2
    assert max(timeline.peak_in_flight) <= p + 0.5


@pytest.mark.parametrize("p", range(1, 7))
def test_few_micro_batches_are_no_slower_than_torch_has_them(p: int) -> None:
    """Where torch's order of so few is legal at all."""
    for m in range(1, 2 * p):
        ours = simulate(build_schedule("dualpipev", 2 * p, m))
        assert max(ours.peak_in_flight) <= p
        theirs = Schedule.from_csv(written(multi_order("ScheduleDualPipeV", p, 2, m)))
        if not schedule_faults(theirs, chain(2 * p)):
            assert ours.makespan <= simulate(theirs).makespan
