from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipecompile.errors import ScheduleError
from pipecompile.schedules import build_schedule
from pipecompile.schedules.catalogue import CATALOGUE
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


@pytest.mark.parametrize("name", ["gpipe", "looped-bfs", "forward", "dualpipev-overlap", "2bp"])
def test_what_has_no_period_is_refused(name: str) -> None:
    n_stages = 3 if name in ("gpipe", "2bp") else 6
    assert find_period(build_schedule(name, n_stages, 24, n_devices=3)) is None
    with pytest.raises(ScheduleError, match=f"{name} has no period"):
        build_periodic(name, n_stages, 36, n_devices=3)


@pytest.mark.parametrize("n_microbatches", [5, 6, 7, 16])
def test_weights_that_are_all_left_to_the_end_are_no_period(n_microbatches: int) -> None:
    """The last W was shifted to micro-batch -1, the number of actions that have none, and stayed there."""
    assert find_period(build_schedule("2bp", 1, n_microbatches)) is None
    with pytest.raises(ScheduleError, match="2bp has no period"):
        build_periodic("2bp", 1, n_microbatches)


@settings(deadline=None)
@given(st.sampled_from(sorted(CATALOGUE)), st.integers(1, 6), st.integers(1, 24), st.integers(1, 6))
def test_a_period_that_is_found_is_the_schedule(name: str, n_stages: int, n_microbatches: int, n_devices: int) -> None:
    with suppress(ScheduleError):
        schedule = build_schedule(name, n_stages, n_microbatches, n_devices=n_devices)
        periodic = find_period(schedule)
        assert periodic is None or periodic.unrolled() == schedule
        assert build_periodic(name, n_stages, n_microbatches, n_devices=n_devices).unrolled() == schedule


@pytest.mark.parametrize(("devices", "stages", "n_microbatches"), [(6, 12, 46), (5, 10, 44), (6, 18, 34)])
def test_a_schedule_with_rounds_of_two_lengths_lacks_no_micro_batch(
    devices: int, stages: int, n_microbatches: int
) -> None:
    """Interleaved schedules have longer rounds first. With another number of micro-batches the period had another step: of 46, 40 were there."""
    for name in ("interleaved", "interleaved-zb"):
        with suppress(ScheduleError):
            periodic = build_periodic(name, stages, n_microbatches, n_devices=devices)
            assert periodic.unrolled() == build_schedule(name, stages, n_microbatches, n_devices=devices)


@pytest.mark.parametrize(("devices", "stages", "n_microbatches"), [(3, 6, 25), (4, 8, 61)])
def test_a_period_is_looked_for_in_as_long_rounds(devices: int, stages: int, n_microbatches: int) -> None:
    """Of 25 micro-batches on 3 devices none was found: 13, in which it was looked for, have four rounds of up to four."""
    periodic = build_periodic("interleaved-zb", stages, n_microbatches, n_devices=devices)
    assert periodic.unrolled() == build_schedule("interleaved-zb", stages, n_microbatches, n_devices=devices)
