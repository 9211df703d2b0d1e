from __future__ import annotations

from pipecompile.ir import Kind
from pipecompile.schedules.building_blocks import loop
from pipecompile.schedules.search.action_times import action_times
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


def test_a_lag_of_some_seconds_makes_forwards_wait_longer() -> None:
    times = action_times(WORK, 2, (Lag(0, 0, Kind.INPUT_GRAD, 1, 0.5),))
    assert times.head[Kind.FORWARD][0] == [0, 6.5]
    assert times.tail[Kind.INPUT_GRAD][0][0] == 0.5 + 1 + 6
