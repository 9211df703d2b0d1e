from __future__ import annotations

import pytest
from schedule_times import rows

from pipecompile.ir import Kind
from pipecompile.ir.in_flight import in_flight
from pipecompile.schedules import build_schedule
from pipecompile.simulation.simulator import simulate


def test_rows() -> None:
    assert rows(build_schedule("zb-2p", 3, 5, n_devices=3)) == [
        "0F0 0F1 0F2 0F3 0F4 0I0 0W0 0I1 0W1 0I2 0W2 0I3 0I4 0W3 0W4",
        "1F0 1F1 1F2 1F3 1I0 1F4 1I1 1W0 1I2 1W1 1I3 1I4 1W2 1W3 1W4",
        "2F0 2F1 2I0 2F2 2I1 2F3 2I2 2F4 2I3 2I4 2W0 2W1 2W2 2W3 2W4",
    ]


@pytest.mark.parametrize("p", range(1, 9))
@pytest.mark.parametrize("more", [0, 1, 6])
def test_makespan_and_memory_at_equal_times(p: int, more: int) -> None:
    m = p + more + 1
    schedule = build_schedule("zb-2p", p, m)
    assert simulate(schedule).makespan == 3 * m + p - 1
    assert max(in_flight(schedule.rows, schedule.placement)) <= 2 * p
    until_input_grad = in_flight(schedule.rows, schedule.placement, until=Kind.INPUT_GRAD)
    assert all(count <= 2 * (p - d) for d, count in enumerate(until_input_grad))
