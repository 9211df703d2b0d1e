from __future__ import annotations

import pytest

from pipecompile.errors import InfeasibleError, InputError, ScheduleError
from pipecompile.ir import Kind, Schedule
from pipecompile.passes.checkpointing import insert_recompute
from pipecompile.passes.offloading import insert_offload, offload_to_fit
from pipecompile.schedules import CATALOGUE, build_schedule, compared_names
from pipecompile.simulation.simulator import simulate
from pipecompile.verifiers import verify

BYTES = {"saved_bytes": 10.0}


def offloads(schedule: Schedule, device: int) -> int:
    return sum(action.kind is Kind.OFFLOAD for action in schedule.rows[device])


def test_each_reload_stands_one_action_before_its_backward() -> None:
    schedule = Schedule.from_csv("0F0,0F1,0F2,0B0,0B1,0B2\n1F0,1B0,1F1,1B1,1F2,1B2\n")
    rows = insert_offload(schedule).to_csv().splitlines()
    assert rows[0] == "0F0,0OFFLOAD0,0F1,0OFFLOAD1,0RELOAD0,0F2,0OFFLOAD2,0RELOAD1,0B0,0RELOAD2,0B1,0B2"
    assert rows[1] == "1F0,1B0,1F1,1B1,1F2,1B2"


@pytest.mark.parametrize("name", compared_names())
def test_every_schedule_stays_legal_and_holds_less(name: str) -> None:
    chunks = CATALOGUE[name].chunks or 1
    schedule = build_schedule(name, 4 * chunks, 8, n_devices=4)
    moved = insert_offload(schedule)
    verify(moved)
    before, after = simulate(schedule, **BYTES), simulate(moved, **BYTES)
    assert sum(after.peak_memory) < sum(before.peak_memory)
    assert after.makespan == pytest.approx(before.makespan), "copies of 0 seconds cost nothing"


def test_a_cell_that_is_recomputed_is_not_offloaded() -> None:
    schedule = insert_recompute(build_schedule("gpipe", 2, 4), (True, False))
    moved = insert_offload(schedule)
    verify(moved)
    assert offloads(moved, 0) == 0
    assert offloads(moved, 1) > 0


def test_only_the_stages_asked_for_are_offloaded() -> None:
    moved = insert_offload(build_schedule("gpipe", 2, 4), [1])
    assert (offloads(moved, 0), offloads(moved, 1)) == (0, 4)
    with pytest.raises(ScheduleError, match="there is no stage 2"):
        insert_offload(build_schedule("gpipe", 2, 4), [2])


@pytest.mark.parametrize("limit", [80.0, 60.0, 40.0, 30.0])
def test_no_more_cells_move_than_a_limit_needs(limit: float) -> None:
    schedule = build_schedule("gpipe", 2, 8)
    fitted = offload_to_fit(schedule, limit, offload=0.5, **BYTES)
    verify(fitted)
    timeline = simulate(fitted, offload=0.5, **BYTES)
    assert max(timeline.peak_memory) <= limit
    needed = (80.0 - limit) / 10
    assert needed <= offloads(fitted, 0) <= 2 * needed + 1


def test_a_limit_per_device_counts_on_its_device_alone() -> None:
    fitted = offload_to_fit(build_schedule("gpipe", 2, 8), [50.0, 1e9], **BYTES)
    assert offloads(fitted, 0) > 0
    assert offloads(fitted, 1) == 0


def test_what_cannot_fit_is_refused() -> None:
    with pytest.raises(InfeasibleError, match=r"device 0 holds .* at its peak"):
        offload_to_fit(build_schedule("gpipe", 2, 8), 9.0, **BYTES)
    with pytest.raises(InputError, match="saved_bytes is missing"):
        offload_to_fit(build_schedule("gpipe", 2, 8), 9.0)
    with pytest.raises(InputError, match="memory_limit"):
        offload_to_fit(build_schedule("gpipe", 2, 8), "much", **BYTES)  # type: ignore[arg-type]
