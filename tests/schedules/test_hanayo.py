from __future__ import annotations

import pytest
from schedule_times import rows

from pipecompile.schedules import build_schedule
from pipecompile.simulation.simulator import simulate


def test_rows() -> None:
    assert rows(build_schedule("hanayo", 4, 2, n_devices=2)) == [
        "0F0 0F1 3F0 3B0 3F1 3B1 0B0 0B1",
        "1F0 2F0 1F1 2F1 2B0 1B0 2B1 1B1",
    ]


@pytest.mark.parametrize("p", range(1, 9))
def test_one_wave_has_two_thirds_of_the_bubble_of_1f1b_and_its_memory(p: int) -> None:
    timeline = simulate(build_schedule("hanayo", 2 * p, p, n_devices=p), forward=0.5, input_grad=0.5, weight_grad=0.5)
    assert timeline.makespan == 3 * p + 2 * (p - 1)
    assert max(timeline.peak_in_flight) == p


@pytest.mark.parametrize("p", range(2, 9))
def test_two_waves_have_about_a_third(p: int) -> None:
    quarter = {"forward": 0.25, "input_grad": 0.25, "weight_grad": 0.25}
    bubble = simulate(build_schedule("hanayo", 4 * p, p, n_devices=p), **quarter).makespan - 3 * p
    assert 0.33 <= bubble / (3 * (p - 1)) <= 0.37


@pytest.mark.parametrize(("chunks", "m"), [(1, 16), (2, 9), (3, 16), (4, 16)])
def test_memory_is_bounded_for_many_microbatches(chunks: int, m: int) -> None:
    for p in (2, 5, 8):
        timeline = simulate(build_schedule("hanayo", chunks * p, m, n_devices=p))
        assert max(timeline.peak_in_flight) <= (3 * p + 1) // 2
