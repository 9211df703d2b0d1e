"""A program that a user wrote: read with the numbers of its lines, and refused if it is not made of the types of the IR."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import pipecompile as pc
from pipecompile.errors import ScheduleError
from pipecompile.ir import Action, Instruction, Kind, Op, Operand, Program, Tie, Value
from pipecompile.ir.written_program import WrittenProgram, type_faults
from pipecompile.passes import lower

PROGRAM = lower(pc.build_schedule("1f1b", 2, 3), ties=(Tie("w", (0, 1)),))


def test_it_is_the_schedule_of_its_actions() -> None:
    written = WrittenProgram.of(PROGRAM)
    assert written.plain == pc.build_schedule("1f1b", 2, 3)
    assert type(written.plain) is pc.Schedule
    assert written.program is PROGRAM
    assert pickle.loads(pickle.dumps(written)) == written


def test_a_file_is_read_with_the_numbers_of_its_lines(tmp_path: Path) -> None:
    """Blank lines, indentation and a byte-order mark are of no account, and lines keep their numbers."""
    text = str(PROGRAM).replace("device 1", "\n\n   device 1")
    (tmp_path / "mine.txt").write_text("\ufeff\n" + text)
    written = WrittenProgram.load(tmp_path / "mine.txt")
    lines = ("\n" + text).splitlines()
    assert written.program == PROGRAM
    assert written.name == "mine"
    for device, row in enumerate(PROGRAM.rows):
        for step, instruction in enumerate(row):
            assert lines[written.line_of(device, step) - 1].strip() == str(instruction)


def test_a_saved_program_is_read_back(tmp_path: Path) -> None:
    PROGRAM.save(tmp_path / "program.txt")
    assert WrittenProgram.load(tmp_path / "program.txt").program == PROGRAM


def test_a_file_that_cannot_be_read_is_named_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "mine.txt"
    with pytest.raises(ScheduleError, match="the program cannot be read") as caught:
        WrittenProgram.load(path)
    assert str(path) in caught.value.where
    path.write_text(str(PROGRAM).replace("SEND v0#1[0] to 1", "SEND v0#1[0] 1"))
    with pytest.raises(ScheduleError, match="cannot be read") as caught:
        WrittenProgram.load(path)
    number = next(n for n, line in enumerate(str(PROGRAM).splitlines(), 1) if "SEND v0#1" in line)
    assert caught.value.where == f"{path}, line {number}"


@pytest.mark.parametrize(
    ("fault", "texts"),
    [
        ("device 1, step 1, RECV v0#0: too early", ["RECV v0#0[0] from 0"]),
        ("device 0: v0#0, written at step 1, is never freed", ["0F0 -> v0#0[0] @0#0[0]"]),
        ("1B2 must read @1#2", ["1B2 @1#2[0] -> v0'1#2[0]"]),
        ("v0'1#2 from device 1 to device 0: sent once", ["RECV v0'1#2[0] from 1", "SEND v0'1#2[0] to 0"]),
        ("route v0: 0 -> 1, 0 bytes, gradient: is wrong", ["route v0: 0 -> 1, 0 bytes, gradient"]),
        ("tie w: 0 1, 0 bytes: is wrong", ["tie w: 0 1, 0 bytes"]),
    ],
)
def test_a_fault_names_its_lines(fault: str, texts: list[str]) -> None:
    lines = [line.strip() for line in str(PROGRAM).splitlines()]
    numbers = [lines.index(text) + 1 for text in texts]
    head = f"line{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}: "
    assert WrittenProgram.of(PROGRAM).located(fault) == head + fault


def test_a_fault_of_no_line_stays_as_it_is_and_many_lines_are_counted() -> None:
    written = WrittenProgram.of(PROGRAM)
    assert written.located("stage 0 never runs F") == "stage 0 never runs F"
    assert written.located("0F0 1F0 0B0 1B0 0F1 1F1: cycle").partition(":")[0].endswith("and 2 more")


X, GO = Operand(Value("v0", 0)), Action(0, Kind.FORWARD, 0)


@pytest.mark.parametrize(
    "instruction",
    [
        "0F0", None, GO, Instruction("SEND"), Instruction(Op.FREE, reads=[X]), Instruction(Op.FREE, reads=("v0#0",)),
        Instruction(Op.SEND, (X,), peer="host"), Instruction(Op.COMPUTE, action="0F0"), Instruction(Op.REDUCE, tie=3),
        Instruction(Op.COMPUTE, action=Action("0", Kind.FORWARD, 0)), Instruction(Op.FREE, (Operand("v0#0"),)),
        Instruction(Op.COMPUTE, action=Action(0, "F", 0)), Instruction(Op.FREE, (Operand(Value("v0", None)),)),
        Instruction(Op.FREE, (Operand(Value("v0", 0, "1")),)), Instruction(Op.FREE, (Operand(Value("v0", 0), 0.5),)),
    ],
)  # fmt: skip
def test_what_is_no_instruction_is_refused_with_its_place(instruction: Any) -> None:
    rows = (PROGRAM.rows[0], (*PROGRAM.rows[1][:4], instruction, *PROGRAM.rows[1][4:]))
    with pytest.raises(ScheduleError, match="device 1, step 4"):
        WrittenProgram.of(replace(PROGRAM, rows=rows))


@pytest.mark.parametrize(
    "change",
    [{"rows": None}, {"rows": [()]}, {"rows": ([],)}, {"routes": None}, {"routes": ("v0",)}, {"ties": [3]},
     {"placement": [0, 1]}, {"placement": (0, None)}, {"n_stages": "2"}, {"n_microbatches": None}],
)  # fmt: skip
def test_what_is_no_program_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ScheduleError, match="types of pipecompile"):
        WrittenProgram.of(replace(PROGRAM, **change))


def test_a_schedule_has_types_too() -> None:
    schedule = pc.build_schedule("1f1b", 2, 2)
    assert not list(type_faults(schedule))
    assert list(type_faults(replace(schedule, rows=(("0F0",), ())))) == ["device 0, step 0: '0F0' is not an Action"]
    assert not list(type_faults(Program(1, 1, (0,), (), ((),))))
