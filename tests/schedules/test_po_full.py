from __future__ import annotations

import pytest
from schedule_times import rows

from pipecompile.schedules import build_schedule
from pipecompile.simulation.simulator import simulate


def test_rows() -> None:
    assert rows(build_schedule("po-full", 4, 3, n_devices=2)) == [
        "0F0 0OFFLOAD0 0F1 0OFFLOAD1 0F2 0OFFLOAD2 2F0 2OFFLOAD0 2F1 2OFFLOAD1 2RELOAD0 2F2 2OFFLOAD2 2RELOAD1 2B0 2RELOAD2 2B1 0RELOAD0 2B2 0RELOAD1 0B0 0RELOAD2 0B1 0B2",
        "1F0 1OFFLOAD0 1F1 1OFFLOAD1 1F2 1OFFLOAD2 3F0 3B0 3F1 3B1 3F2 1RELOAD0 3B2 1RELOAD1 1B0 1RELOAD2 1B1 1B2",
    ]


@pytest.mark.parametrize(("p", "v", "m"), [(2, 1, 2), (3, 1, 8), (4, 2, 8), (3, 3, 7), (8, 2, 16)])
def test_makespan_and_memory(p: int, v: int, m: int) -> None:
    share = dict.fromkeys(("forward", "input_grad", "weight_grad"), 1 / v)
    timeline = simulate(build_schedule("po-full", p * v, m, n_devices=p), **share, saved_bytes=1.0)
    assert timeline.makespan == pytest.approx(3 * m + 3 * (p - 1) / v)
    assert max(timeline.peak_memory) == 2
