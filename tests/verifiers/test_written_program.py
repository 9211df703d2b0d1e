"""The verifier of a user's program: each fault names the lines of the file."""

from __future__ import annotations

from pathlib import Path

import pytest

import pipecompile as pc
from pipecompile.errors import VerifyError
from pipecompile.ir.written_program import WrittenProgram
from pipecompile.passes import lower
from pipecompile.verifiers.written_program import verify_written

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
