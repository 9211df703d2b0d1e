"""The entry points raise one VerifyError with all faults, and refuse arguments that do not fit the subject."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import pipecompile as pc
from pipecompile.errors import InputError, VerifyError
from pipecompile.ir import Action, Kind, Route, Schedule
from pipecompile.ir.written_program import WrittenProgram
from pipecompile.passes import lower
from pipecompile.schedules import build_schedule
from pipecompile.verifiers import Level, verify, verify_program
from pipecompile.verifiers.verification import verify_written

SCHEDULE = build_schedule("1f1b", 2, 4)


def test_a_legal_schedule_and_its_program_pass() -> None:
    verify(SCHEDULE)
    verify(lower(SCHEDULE), models="fifo", in_flight=2)


def test_all_faults_of_a_schedule_come_at_once_with_a_picture() -> None:
    with pytest.raises(VerifyError, match="schedule 'csv' is not legal: 2 faults") as caught:
        verify(Schedule.from_csv("0B0,0F0\n1B0,1F0\n"))
    assert "device 0 │ 0B0* 0F0*" in str(caught.value)


def test_routes_are_verified_before_the_schedule_is_verified_under_them() -> None:
    with pytest.raises(VerifyError, match="the route goes back") as caught:
        verify(SCHEDULE, routes=(Route("v", 1, (0,)),))
    assert len(caught.value.faults) == 1


def test_a_program_below_the_last_level_is_verified_up_to_its_level() -> None:
    program = lower(SCHEDULE)
    verify_program(program, Level.COMPUTE)
    without_frees = type(program)(
        program.n_stages, program.n_microbatches, program.placement, program.routes,
        tuple(tuple(i for i in row if i.op.value != "FREE") for row in program.rows),
    )  # fmt: skip
    verify_program(without_frees, Level.TIES)
    with pytest.raises(VerifyError, match="program at level LIVENESS is not legal"):
        verify_program(without_frees, Level.LIVENESS)


def test_a_limit_needs_a_number_for_all_or_one_per_device() -> None:
    verify(SCHEDULE, in_flight=[2, 1])
    with pytest.raises(VerifyError, match="device 0 has 2 micro-batches in flight, 1 are allowed"):
        verify(SCHEDULE, in_flight=1)
    with pytest.raises(
        InputError, match="in_flight has 1 number for 2 devices\n  try    one number, or one per device"
    ):
        verify(SCHEDULE, in_flight=[2])
    with pytest.raises(InputError, match=r"verify\(lower\(schedule\), memory_limit="):
        verify(SCHEDULE, memory_limit=1e9)


def test_counts_of_a_program_made_by_hand_are_whole_numbers() -> None:
    program = replace(pc.lower_periodic(pc.build_periodic("1f1b", 2, 64)).unrolled(1), n_microbatches="3")  # type: ignore[arg-type]
    with pytest.raises(VerifyError, match="n_microbatches is '3', not a whole number"):
        pc.verify(program)
    periodic = replace(pc.lower_periodic(pc.build_periodic("1f1b", 2, 64)), repetitions=2.5)  # type: ignore[arg-type]
    with pytest.raises(VerifyError, match=r"repetitions is 2\.5, not a whole number"):
        pc.verify(periodic)


@pytest.mark.parametrize(
    ("parts", "fault"),
    [
        ({"n_microbatches": 10**9}, "n_microbatches is 1,000,000,000, and there are"),
        ({"rows": None}, "rows is None, not a tuple with a tuple per device"),
        ({"ties": "x"}, "ties is 'x', not a tuple of Tie"),
        ({"placement": [10**5000]}, "placement is .a number of thousands of digits., not a tuple of whole numbers"),
    ],
    ids=["count", "rows", "ties", "placement"],
)
def test_parts_of_a_program_made_by_hand_have_their_types(parts: dict[str, Any], fault: str) -> None:
    with pytest.raises(VerifyError, match=fault):
        pc.verify(replace(lower(SCHEDULE), **parts))


def test_overlaps_and_numbers_of_a_schedule_made_by_hand() -> None:
    with pytest.raises(VerifyError, match="overlaps is True, not a frozenset"):
        pc.verify(replace(SCHEDULE, overlaps=True))
    with pytest.raises(VerifyError, match="microbatch=a number of thousands of digits"):
        pc.verify(replace(SCHEDULE, rows=((Action(0, Kind.FORWARD, -(10**5000)),), SCHEDULE.rows[1])))


LINES = str(lower(pc.build_schedule("zb-h1", 2, 3))).splitlines()


def written(path: Path, lines: list[str]) -> WrittenProgram:
    path.write_text("\n".join(lines))
    return WrittenProgram.load(path)


def test_a_program_as_it_was_lowered_is_accepted(tmp_path: Path) -> None:
    verify_written(written(tmp_path / "mine.txt", LINES))


@pytest.mark.parametrize("index", [i for i, line in enumerate(LINES) if line.startswith("  ")])
def test_every_line_is_needed_and_a_fault_names_a_line_near(index: int, tmp_path: Path) -> None:
    """Without a line, some fault names the line of another use of the same value or action."""
    with pytest.raises(VerifyError) as caught:
        verify_written(written(tmp_path / "mine.txt", LINES[:index] + LINES[index + 1 :]))
    assert caught.value.subject == str(tmp_path / "mine.txt")
    assert any(fault.startswith("line") for fault in caught.value.faults), caught.value.faults
