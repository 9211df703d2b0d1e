"""Several copies of each stage: read from rows, and refused where a stage is on two devices for one micro-batch."""

from __future__ import annotations

import pytest

import pipecompile as pc
from pipecompile.errors import ScheduleError
from pipecompile.ir.directions import (
    Direction,
    all_placements,
    check_one_direction,
    copies_placed,
    directions_fault,
    placement_of,
    stages_on,
)
from pipecompile.passes import lower

UP_AND_DOWN = pc.build_schedule("chimera", 4, 4)


def test_directions_follow_from_the_rows() -> None:
    read = pc.Schedule.from_csv(UP_AND_DOWN.to_csv())
    assert read == UP_AND_DOWN
    assert read.directions == (Direction((3, 2, 1, 0), (1, 3)),)
    assert str(read.directions[0]) == "direction: devices 3 2 1 0, micro-batches 1 3"


def test_a_device_may_run_both_copies_of_a_stage() -> None:
    schedule = pc.build_schedule("chimera", 3, 4)
    assert all_placements(schedule) == ((0, 1, 2), (2, 1, 0))
    assert stages_on(schedule, 3) == [[0, 2], [1], [0, 2]]
    assert sorted(copies_placed(schedule)) == [0, 0, 1, 2, 2]
    assert placement_of(schedule) == {1: (2, 1, 0), 3: (2, 1, 0)}


@pytest.mark.parametrize(
    "rows",
    [
        [["0F0", "0B0"], ["0F0", "1F0", "1B0"]],
        [["0F0", "0F1", "0B0"], ["1F0", "1B0", "1F1", "1B1", "0B1"]],
        [["0F0", "0B0", "1F1"], ["1F0", "1B0"]],
        [["0F0.0", "0F0.1"], ["0F1.0", "0F1.1"]],
        [["0F0", "0B0"], ["0F1", "0B1"]],
        [["0F0", "0F1", "1F1", "1B1", "0B0", "0B1"], ["1F0", "1B0"]],
    ],
    ids=[
        "cell",
        "forward and backward",
        "a stage is missing",
        "slices",
        "other devices",
        "a micro-batch on one device",
    ],
)
def test_a_stage_on_two_devices_is_refused(rows: list[list[str]]) -> None:
    with pytest.raises(ScheduleError, match=r"stage \d is on device \d and on device \d"):
        pc.Schedule.from_rows(rows)


def test_a_stage_of_a_high_number_is_refused_at_once() -> None:
    with pytest.raises(ScheduleError, match="stage 0 is on device 0 and on device 1"):
        pc.Schedule.from_rows([["0F0", "0B0", "999999999F1"], ["0F1", "0B1"]])


def test_the_text_of_a_program_has_the_directions() -> None:
    from pipecompile.ir.program_text import parse_program

    program = lower(UP_AND_DOWN)
    assert "\ndirection: devices 3 2 1 0, micro-batches 1 3\nroute v0:" in str(program)
    assert parse_program(str(program)) == program
    with pytest.raises(ScheduleError, match="line 2"):
        parse_program(str(program).replace("direction: devices 3", "direction: device 3"))


def test_what_supports_one_copy_says_so() -> None:
    check_one_direction(pc.build_schedule("1f1b", 4, 4), "this page shows one")
    with pytest.raises(ScheduleError, match="'chimera' has 2 copies of each stage, and this page shows one"):
        check_one_direction(UP_AND_DOWN, "this page shows one")


@pytest.mark.parametrize("value", [[], (1,), (Direction([0], (1,)),), (Direction((0,), (1.5,)),), None])  # type: ignore[arg-type]
def test_other_data_is_a_fault(value: object) -> None:
    assert directions_fault(value)
    assert not directions_fault(UP_AND_DOWN.directions)
