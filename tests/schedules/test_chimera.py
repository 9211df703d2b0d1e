from __future__ import annotations

import pytest
from schedule_times import rows

from pipecompile.ir.directions import Direction
from pipecompile.schedules import build_schedule
from pipecompile.simulation.simulator import simulate


def test_rows() -> None:
    schedule = build_schedule("chimera", 2, 4)
    assert rows(schedule) == [
        "0F0 1F1 1B1 0F2 0B0 1F3 1B3 0B2",
        "0F1 1F0 1B0 0F3 0B1 1F2 1B2 0B3",
    ]
    assert schedule.placement == (0, 1)
    assert schedule.directions == (Direction((1, 0), (1, 3)),)


@pytest.mark.parametrize("p", range(2, 13, 2))
def test_bubble_and_memory_are_those_of_the_paper(p: int) -> None:
    """Table 2 of Li and Hoefler: P - 2 bubbles of half a forward and half a backward, and P / 2 + 1 to P micro-batches."""
    timeline = simulate(build_schedule("chimera", p, p), forward=1.0, backward=2.0)
    assert timeline.makespan == 3 * p + (p - 2) * 2
    ends = [*range(p // 2 + 1, p + 1)]
    assert [2 * peak for peak in timeline.peak_in_flight] == [*ends, *reversed(ends)]


@pytest.mark.parametrize("p", range(4, 13, 2))
@pytest.mark.parametrize("more", [2, 4, 10, 12])
def test_more_micro_batches_save_a_forward(p: int, more: int) -> None:
    timeline = simulate(build_schedule("chimera", p, p + more), forward=1.0, backward=2.0)
    assert timeline.makespan == 3 * (p + more) + (p - 2) * 2 - 1
    assert max(timeline.peak_in_flight) * 2 <= p + 1


@pytest.mark.parametrize("p", range(2, 11))
@pytest.mark.parametrize("m", [2, 5, 8, 12, 33])
def test_it_is_no_slower_than_1f1b(p: int, m: int) -> None:
    chimera, plain = (simulate(build_schedule(name, p, m)).makespan for name in ("chimera", "1f1b"))
    assert chimera < plain or m < 3


def test_one_microbatch_has_one_direction() -> None:
    assert not build_schedule("chimera", 3, 1).directions
    assert not build_schedule("chimera", 1, 4).directions
