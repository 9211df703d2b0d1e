from __future__ import annotations

from dataclasses import replace

import pytest

from pipecompile.ir import Kind
from pipecompile.schedules.building_blocks import loop
from pipecompile.schedules.search.action_times import action_times, least_held, least_seconds
from pipecompile.schedules.search.release_lags import Lag
from pipecompile.schedules.search.workload import unit_workload

WORK = unit_workload(loop(3, 3))


def test_heads_and_tails_of_a_chain() -> None:
    """The second I of the last stage waits for two F and one I of its device."""
    times = action_times(WORK, 2, ())
    assert times.head[Kind.FORWARD] == [[0, 1], [1, 2], [2, 3]]
    assert times.head[Kind.INPUT_GRAD] == [[5, 7], [4, 6], [3, 5]]
    assert times.head[Kind.WEIGHT_GRAD] == [[6, 8], [5, 7], [4, 6]]
    assert times.tail[Kind.WEIGHT_GRAD] == [[1, 0], [1, 0], [1, 0]]
    assert times.tail[Kind.INPUT_GRAD] == [[2, 1], [3, 2], [4, 3]]
    assert times.tail[Kind.FORWARD] == [[7, 6], [6, 5], [5, 4]]


def test_a_lag_makes_forwards_wait() -> None:
    times = action_times(WORK, 2, (Lag(0, 0, Kind.INPUT_GRAD, 1),))
    assert times.head[Kind.FORWARD][0] == [0, 6]
    assert times.tail[Kind.INPUT_GRAD][0][0] == 1 + 6


def test_whole_backwards_count_where_they_are_shorter() -> None:
    cell = least_seconds(replace(WORK, backward=(1.5, 2.0, 9.0)))
    assert (cell.input_grad, cell.weight_grad) == ((1.0, 1.0, 1.0), (0.5, 1.0, 1.0))
    whole = least_seconds(replace(WORK, split=False))
    assert (whole.input_grad, whole.weight_grad) == ((2.0, 2.0, 2.0), (0.0, 0.0, 0.0))


@pytest.mark.parametrize(("stage", "seconds"), [(0, 6.0), (1, 4.0), (2, 2.0)])
def test_a_micro_batch_is_held_on_its_way_through_later_stages(stage: int, seconds: float) -> None:
    assert least_held(WORK, least_seconds(WORK), stage) == seconds
