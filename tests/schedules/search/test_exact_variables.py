from __future__ import annotations

import pytest

from pipecompile.ir import Kind
from pipecompile.schedules.building_blocks import loop
from pipecompile.schedules.search.exact_variables import ExactModel, rows_of
from pipecompile.schedules.search.ticks import Tick
from pipecompile.schedules.search.workload import unit_workload


@pytest.mark.parametrize(("tick", "expected"), [(Tick(0.5, is_exact=True), 4.5), (Tick(0.5, is_exact=False), 4.2)])
def test_whole_ticks_leave_the_next_one(tick: Tick, expected: float) -> None:
    """If nothing takes 4.2 seconds or less, a makespan of whole ticks is at least 4.5."""
    assert ExactModel(None, tick, None).least_above(4.2) == expected


def test_actions_that_may_be_left_out_are_options() -> None:
    tick = Tick(1.0, is_exact=True)
    assert not ExactModel(None, tick, None).has_options
    assert ExactModel(None, tick, None, recomputes={0: None}).has_options
    assert ExactModel(None, tick, None, is_whole={(0, 1): None}).has_options


def test_actions_run_by_their_start_and_a_whole_backward_has_no_w() -> None:
    f, i, w = Kind.FORWARD, Kind.INPUT_GRAD, Kind.WEIGHT_GRAD
    start = {(f, 0, 0): 0, (i, 0, 0): 3, (w, 0, 0): 5, (f, 0, 1): 1, (i, 0, 1): 6, (w, 0, 1): 7}
    end = {key: time + 1 for key, time in start.items()}
    model = ExactModel(None, Tick(1.0, is_exact=True), None, start, end, is_whole={(0, 0): True, (0, 1): False})
    rows = rows_of(model, lambda value: value, unit_workload(loop(1, 1)))
    assert [[str(action) for action in row] for row in rows] == [["0F0", "0F1", "0B0", "0I1", "0W1"]]
