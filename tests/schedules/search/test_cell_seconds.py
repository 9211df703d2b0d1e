from __future__ import annotations

from dataclasses import replace

import pytest

from pipecompile.schedules.building_blocks import loop
from pipecompile.schedules.search.cell_seconds import least_held, least_return, least_seconds
from pipecompile.schedules.search.workload import unit_workload

WORK = unit_workload(loop(3, 3))


def test_whole_backwards_count_where_they_are_shorter() -> None:
    cell = least_seconds(replace(WORK, backward=(1.5, 2.0, 9.0)))
    assert (cell.input_grad, cell.weight_grad) == ((1.0, 1.0, 1.0), (0.5, 1.0, 1.0))
    whole = least_seconds(replace(WORK, split=False))
    assert (whole.input_grad, whole.weight_grad) == ((2.0, 2.0, 2.0), (0.0, 0.0, 0.0))


@pytest.mark.parametrize(("stage", "seconds"), [(0, 6.0), (1, 4.0), (2, 2.0)])
def test_a_micro_batch_is_held_on_its_way_through_later_stages(stage: int, seconds: float) -> None:
    assert least_held(WORK, least_seconds(WORK), stage) == seconds


def test_a_gradient_returns_through_all_stages_in_between() -> None:
    cell = least_seconds(replace(WORK, input_grad=(1.0, 2.0, 4.0)))
    assert least_return(WORK, cell, 2, 0) == 3.0
    assert least_return(WORK, cell, 2, 1) == 2.0
