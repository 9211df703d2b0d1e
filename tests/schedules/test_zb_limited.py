from __future__ import annotations

import pytest

from pipecompile.ir.in_flight import in_flight
from pipecompile.schedules.zb_limited import zero_bubble_within
from pipecompile.verifiers import verify


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_the_limit_holds_on_every_device(limit: int) -> None:
    for p in (1, 3, 6):
        schedule = zero_bubble_within(limit * p, p, 3 * p + 1, "mine")
        verify(schedule)
        assert schedule.name == "mine"
        assert max(in_flight(schedule.rows, schedule.placement)) <= limit * p
