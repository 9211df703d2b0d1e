from __future__ import annotations

from pipecompile.ir import Kind
from pipecompile.schedules.building_blocks import loop
from pipecompile.schedules.search.exact_rows import rows_of
from pipecompile.schedules.search.exact_variables import ExactModel
from pipecompile.schedules.search.ticks import Tick
from pipecompile.schedules.search.workload import unit_workload


def test_actions_run_by_their_start_and_a_whole_backward_has_no_w() -> None:
    f, i, w = Kind.FORWARD, Kind.INPUT_GRAD, Kind.WEIGHT_GRAD
    start = {(f, 0, 0): 0, (i, 0, 0): 3, (w, 0, 0): 5, (f, 0, 1): 1, (i, 0, 1): 6, (w, 0, 1): 7}
    end = {key: time + 1 for key, time in start.items()}
    model = ExactModel(None, Tick(1.0, is_exact=True), None, start, end, is_whole={(0, 0): True, (0, 1): False})
    rows = rows_of(model, lambda value: value, unit_workload(loop(1, 1)))
    assert [[str(action) for action in row] for row in rows] == [["0F0", "0F1", "0B0", "0I1", "0W1"]]
