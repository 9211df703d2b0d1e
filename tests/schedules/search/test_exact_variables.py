from __future__ import annotations

import pytest

from pipecompile.schedules.search.exact_variables import ExactModel
from pipecompile.schedules.search.ticks import Tick


@pytest.mark.parametrize(("tick", "expected"), [(Tick(0.5, is_exact=True), 4.5), (Tick(0.5, is_exact=False), 4.2)])
def test_whole_ticks_leave_the_next_one(tick: Tick, expected: float) -> None:
    """If nothing takes 4.2 seconds or less, a makespan of whole ticks is at least 4.5."""
    assert ExactModel(None, tick, None).least_above(4.2) == expected


def test_actions_that_may_be_left_out_are_options() -> None:
    tick = Tick(1.0, is_exact=True)
    assert not ExactModel(None, tick, None).has_options
    assert ExactModel(None, tick, None, recomputes={0: None}).has_options
    assert ExactModel(None, tick, None, is_whole={(0, 1): None}).has_options
