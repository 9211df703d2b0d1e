"""What is saved is written, or an error of ours says why not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import pipecompile as pc
from pipecompile.errors import InputError
from pipecompile.ir.written_program import WrittenProgram
from pipecompile.partitioners import Node, Problem
from pipecompile.passes import lower
from pipecompile.text.text_file import save_text

SCHEDULE = pc.build_schedule("1f1b", 2, 8)
SAVED: list[Any] = [
    SCHEDULE,
    lower(SCHEDULE),
    pc.lower_periodic(pc.build_periodic("1f1b", 2, 32)),
    Problem((Node("a"),)),
]


def test_a_text_is_written(tmp_path: Path) -> None:
    save_text(tmp_path / "x", "µ\n")
    assert (tmp_path / "x").read_text(encoding="utf-8") == "µ\n"


@pytest.mark.parametrize("subject", SAVED, ids=lambda subject: type(subject).__name__)
def test_a_folder_no_folder_and_no_path_are_refused(subject: Any, tmp_path: Path) -> None:
    for path, message in (
        (tmp_path, "cannot be written: Is a directory"),
        (tmp_path / "none" / "x", "cannot be written: No such file or directory"),
        (None, "path=None is not a path"),
        ("a\0b", "is not a path"),
    ):
        with pytest.raises(InputError, match=message):
            subject.save(path)


def test_a_fault_in_the_text_of_a_file_has_the_name_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "two.csv").write_text("0F0,0B0\n0F1,0B1\n")
    with pytest.raises(pc.ScheduleError, match=r"(?s)where  .*two\.csv, row 1 \(line 2\), action 0F1"):
        pc.Schedule.load(tmp_path / "two.csv")
    (tmp_path / "none.csv").write_text(",\n")
    with pytest.raises(pc.ScheduleError, match=r"(?s)no action.*where  .*none\.csv\n"):
        pc.Schedule.load(tmp_path / "none.csv")


@pytest.mark.parametrize("kind", [pc.Schedule, pc.Plan, Problem, WrittenProgram], ids=lambda kind: kind.__name__)
def test_a_file_that_is_not_there_is_refused_with_what_writes_one(kind: Any, tmp_path: Path) -> None:
    with pytest.raises(
        pc.PipecompileError,
        match=r"(?s)cannot be read\n  where .*none\n  why .*No such file.*\n  try .*pipe|schedule\.save",
    ):
        kind.load(tmp_path / "none")
