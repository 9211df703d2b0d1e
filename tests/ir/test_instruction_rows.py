from __future__ import annotations

from pipecompile.ir import Instruction, Op
from pipecompile.ir.instruction_rows import InstructionRow, InstructionTable, folded
from pipecompile.ir.program_text import parse_instruction

LINES = ("0F0 -> v0#0 @0#0", "SEND v0#0 to 1", "0F1 -> v0#1 @0#1", "SEND v0#1 to 1", "0F2 -> v0#2 @0#2", "SEND v0#2 to 1",
         "0B0 @0#0 v0'1#0 ->", "REDUCE w")  # fmt: skip
ROW = tuple(map(parse_instruction, LINES))


def row_of(instructions: tuple[Instruction, ...]) -> InstructionRow:
    return InstructionTable().row(instructions)


def test_a_row_is_the_sequence_of_its_instructions() -> None:
    row = row_of(ROW)
    assert (tuple(row), len(row), row[2], row[-1]) == (ROW, len(ROW), ROW[2], ROW[-1])
    assert row == ROW
    assert row[1:3] == ROW[1:3]
    assert hash(row) == hash(ROW)
    assert len(row.table.templates) == 4
    assert row != ROW[1:]
    assert row != [*ROW]


def test_rows_of_two_tables_are_compared_by_their_instructions() -> None:
    other = InstructionTable()
    other.number(Instruction(Op.FREE))
    assert row_of(ROW) == other.row(ROW)
    assert row_of(ROW) != other.row((*ROW[:6], ROW[7], ROW[6]))
    assert other.row(row_of(ROW)) == ROW


def test_what_has_no_micro_batch_is_not_later() -> None:
    later = row_of(ROW).later(3)
    assert [str(one) for one in later][-2:] == ["0B3 @0#3 v0'1#3 ->", "REDUCE w"]
    assert later.later(-3) == ROW


def test_what_is_repeated_is_one_group() -> None:
    groups = [(group.start, group.length, group.times, group.step) for group in folded(row_of(ROW))]
    assert groups == [(0, 2, 3, 1), (6, 1, 1, 1), (7, 1, 1, 1)]


def test_what_stays_on_one_micro_batch_is_no_group() -> None:
    """The second of two equal instructions is not later; a verifier names it."""
    assert all(group.times == 1 for group in folded(row_of((ROW[0], ROW[0], ROW[0], ROW[0]))))
