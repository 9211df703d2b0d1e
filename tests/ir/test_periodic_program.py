from __future__ import annotations

from pathlib import Path

import pytest

from pipecompile.errors import InputError, ScheduleError
from pipecompile.ir import Program
from pipecompile.ir.periodic_program import PeriodicProgram, later

TEXT = """periodic program: 1 stages on devices 0, 5 micro-batches, 4 times 1 later
device 0
 prologue
  0F0 -> @0#0
 period
  0F1 -> @0#1
  0B0 @0#0 ->
  FREE @0#0
 epilogue
  0B0 @0#0 ->
  FREE @0#0
"""


def test_the_text_is_read_back(tmp_path: Path) -> None:
    program = PeriodicProgram.from_text(TEXT)
    assert str(program) == TEXT
    assert (program.n_microbatches, program.n_devices, program.repetitions, program.step) == (5, 1, 4, 1)
    program.save(tmp_path / "program.txt")
    assert (tmp_path / "program.txt").read_text() == TEXT


def test_repetitions_and_the_epilogue_are_later() -> None:
    program = PeriodicProgram.from_text(TEXT).repeated(2).unrolled()
    assert isinstance(program, Program)
    (row,) = program.rows
    assert [str(i) for i in row] == ["0F0 -> @0#0", "0F1 -> @0#1", "0B0 @0#0 ->", "FREE @0#0", "0F2 -> @0#2", "0B1 @0#1 ->",
                                     "FREE @0#1", "0B2 @0#2 ->", "FREE @0#2"]  # fmt: skip
    assert later(row[1:4], 1) == row[4:7]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("periodic program", "program", "the text holds no periodic program"),
        ("5 micro-batches", "6 micro-batches", "the first line says 6 micro-batches"),
        (" period\n", "", "'epilogue' is out of place"),
        (" prologue\n", "", "'period' is out of place"),
        (" epilogue\n", "", "a device has no prologue, period and epilogue"),
        ("0F1 ->", "0F1", "'0F1 @0#1' cannot be read"),
    ],
)
def test_another_text_is_refused(old: str, new: str, message: str) -> None:
    assert old in TEXT
    with pytest.raises(ScheduleError, match=message):
        PeriodicProgram.from_text(TEXT.replace(old, new, 1))


def test_what_is_no_text_is_refused() -> None:
    with pytest.raises(InputError, match="a NoneType is not the text of a program"):
        PeriodicProgram.from_text(None)  # type: ignore[arg-type]
