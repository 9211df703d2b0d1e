from __future__ import annotations

import pytest
from schedule_times import rows

from pipecompile.ir import Action, Kind
from pipecompile.schedules import build_schedule
from pipecompile.simulation.simulator import simulate


def test_rows() -> None:
    assert rows(build_schedule("mario", 3, 4, n_devices=3)) == [
        "0F0 0F1 0F2 0R0 0B0 0F3 0R1 0B1 0R2 0B2 0R3 0B3",
        "1F0 1F1 1R0 1B0 1F2 1R1 1B1 1F3 1R2 1B2 1R3 1B3",
        "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3",
    ]


@pytest.mark.parametrize(("p", "m"), [(1, 3), (2, 2), (3, 5), (4, 8), (6, 16), (8, 16)])
def test_makespan_and_memory(p: int, m: int) -> None:
    timeline = simulate(build_schedule("mario", p, m), saved_bytes=8.0, recipe_bytes=1.0)
    assert timeline.makespan == 3 * (m + p - 1) + (m - 2 if p > 1 else 0)
    assert timeline.peak_memory == (*(8.0 + min(p - s, m) for s in range(p - 1)), 8.0)


def test_a_backward_directly_after_its_forward_needs_no_recomputation() -> None:
    counts = [
        row.count(Action(stage, Kind.RECOMPUTE, 5)) for stage, row in enumerate(build_schedule("mario", 4, 9).rows)
    ]
    assert counts == [1, 1, 1, 0]
