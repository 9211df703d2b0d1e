from __future__ import annotations

import pytest
from schedule_times import rows

from pipecompile.schedules import build_schedule
from pipecompile.simulation.simulator import simulate


def test_rows() -> None:
    assert rows(build_schedule("po-half", 4, 3, n_devices=2)) == [
        "0F0 0OFFLOAD0 0F1 0OFFLOAD1 0F2 0OFFLOAD2 2F0 2F1 2F2 2B0 2B1 0RELOAD0 2B2 0RELOAD1 0B0 0RELOAD2 0B1 0B2",
        "1F0 1OFFLOAD0 1F1 1OFFLOAD1 1F2 1OFFLOAD2 3F0 3B0 3F1 3B1 3F2 1RELOAD0 3B2 1RELOAD1 1B0 1RELOAD2 1B1 1B2",
    ]


@pytest.mark.parametrize(("p", "m"), [(3, 6), (3, 12), (4, 8), (4, 16), (6, 12), (8, 16)])
def test_makespan_and_memory(p: int, m: int) -> None:
    half = {"forward": 0.5, "input_grad": 0.5, "weight_grad": 0.5, "saved_bytes": 0.5}
    timeline = simulate(build_schedule("po-half", 2 * p, m, n_devices=p), **half)
    assert timeline.makespan == 3 * m + 3 * (p - 1) / 2
    assert max(timeline.peak_memory) <= (p + 2) / 2


def test_half_of_the_copies_saves_more_than_half_of_the_memory_of_the_first_device() -> None:
    whole, half = (
        simulate(build_schedule(name, 16, 16, n_devices=8), saved_bytes=0.5).peak_memory[0]
        for name in ("interleaved", "po-half")
    )
    assert half < whole / 2
