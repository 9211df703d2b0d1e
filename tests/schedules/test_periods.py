from __future__ import annotations

import pytest

from pipecompile.errors import ScheduleError
from pipecompile.schedules import build_schedule
from pipecompile.schedules.periods import build_periodic, find_period

PERIODIC = (
    "1f1b", "eager-1f1b", "interleaved", "zb-h1", "zb-h2", "interleaved-zb", "zbv", "v-half", "v-min", "dualpipev", "sequential",
    "mario", "po-half",
)  # fmt: skip


@pytest.mark.parametrize("name", PERIODIC)
def test_a_period_of_few_micro_batches_is_that_of_many(name: str) -> None:
    n_stages = 3 if name in ("1f1b", "eager-1f1b", "zb-h1", "zb-h2", "mario") else 6
    periodic = build_periodic(name, n_stages, 36, n_devices=3)
    schedule = build_schedule(name, n_stages, 36, n_devices=3)
    assert periodic.unrolled() == schedule
    assert find_period(schedule) == periodic


@pytest.mark.parametrize("name", ["gpipe", "looped-bfs", "forward", "dualpipev-overlap"])
def test_what_has_no_period_is_refused(name: str) -> None:
    n_stages = 3 if name == "gpipe" else 6
    assert find_period(build_schedule(name, n_stages, 24, n_devices=3)) is None
    with pytest.raises(ScheduleError, match=f"{name} has no period"):
        build_periodic(name, n_stages, 36, n_devices=3)
