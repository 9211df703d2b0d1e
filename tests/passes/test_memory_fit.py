from __future__ import annotations

import pytest

from pipecompile.errors import InfeasibleError, InputError, ScheduleError
from pipecompile.passes.memory_fit import check_schedule, checked_stages, does_not_fit, first_over


def test_stages_are_a_collection_of_numbers_that_are_there() -> None:
    assert checked_stages({0, 2}, 3) == {0, 2}
    with pytest.raises(ScheduleError, match="there is no stage 3"):
        checked_stages([3], 3)
    with pytest.raises(InputError, match="is not a collection of stages"):
        checked_stages("0", 3)
    with pytest.raises(InputError, match="a str is not a Schedule"):
        check_schedule("1f1b", None)  # type: ignore[arg-type]


def test_the_first_moment_over_a_limit_allows_for_rounding() -> None:
    assert first_over([(0.0, 1.0), (2.0, 3.0 + 1e-10), (4.0, 3.1)], 3.0) == 4.0
    assert first_over([(0.0, 1.0)], 3.0) is None
    assert isinstance(does_not_fit(1, 2e6, 1e6, "why", "hint"), InfeasibleError)
