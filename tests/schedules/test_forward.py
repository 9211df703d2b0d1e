from __future__ import annotations

from pipecompile.schedules import build_schedule
from pipecompile.simulation.simulator import simulate


def test_only_forwards() -> None:
    assert build_schedule("forward", 2, 3).to_csv().splitlines() == ["0F0,0F1,0F2", "1F0,1F1,1F2"]


def test_several_stages_on_a_device_go_one_after_the_other() -> None:
    schedule = build_schedule("forward", 4, 2, n_devices=2)
    assert schedule.to_csv().splitlines() == ["0F0,0F1,2F0,2F1", "1F0,1F1,3F0,3F1"]


def test_makespan_and_memory() -> None:
    timeline = simulate(build_schedule("forward", 3, 4), forward=2.0)
    assert timeline.makespan == (4 + 3 - 1) * 2.0
    assert timeline.peak_in_flight == (0.0,) * 3
