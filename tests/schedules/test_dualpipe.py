from __future__ import annotations

import pytest
from schedule_times import rows

from pipecompile.ir.directions import Direction
from pipecompile.schedules import build_schedule
from pipecompile.simulation.simulator import simulate


def test_rows() -> None:
    schedule = build_schedule("dualpipe", 2, 4)
    assert rows(schedule) == ["0F0 1F1 0F2 1B1 1F3 0B0 1B3 0I2 0W2", "0F1 1F0 0F3 1B0 1F2 0B1 1B2 0I3 0W3"]
    assert schedule.directions == (Direction((1, 0), (1, 3)),)


@pytest.mark.parametrize("p", range(2, 11, 2))
@pytest.mark.parametrize("m", [2, 4, 8, 20])
def test_it_is_the_v_on_twice_the_devices(p: int, m: int) -> None:
    timeline = simulate(build_schedule("dualpipe", p, m))
    assert timeline.makespan == simulate(build_schedule("dualpipev", p, m // 2, n_devices=p // 2)).makespan
    if m >= 2 * p:
        assert timeline.makespan == 3 * m + p / 2 - 1
    assert max(timeline.peak_in_flight) * 2 <= p + 1


@pytest.mark.parametrize(("p", "m"), [(4, 9), (6, 13), (2, 3), (8, 5)])
def test_an_odd_micro_batch_is_alone_in_its_direction(p: int, m: int) -> None:
    schedule = build_schedule("dualpipe", p, m)
    assert schedule.n_microbatches == m
    assert simulate(schedule).makespan <= simulate(build_schedule("chimera", p, m)).makespan


def test_devices_without_a_partner_run_chimera() -> None:
    assert build_schedule("dualpipe", 3, 6).rows == build_schedule("chimera", 3, 6).rows
    assert not build_schedule("dualpipe", 4, 1).directions
