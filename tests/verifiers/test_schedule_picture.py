from __future__ import annotations

import pytest

from pipecompile.errors import VerifyError
from pipecompile.ir import Schedule
from pipecompile.schedules import build_schedule
from pipecompile.verifiers import verify


def told(schedule: Schedule) -> str:
    with pytest.raises(VerifyError) as caught:
        verify(schedule)
    return str(caught.value)


def test_what_is_wrong_is_marked_where_it_stands() -> None:
    text = told(Schedule.from_csv("0F0,0F1,0B0,0B1\n1B0,1F0,1F1,1F1,1B1\n"))
    assert text.endswith("  device 0 │ 0F0  0F1  0B0  0B1\n  device 1 │ 1B0* 1F0* 1F1* 1F1* 1B1")


def test_a_cycle_is_marked_all_around() -> None:
    text = told(Schedule.from_csv("0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n"))
    assert text.endswith("  device 0 │ 0F0  0B0* 0F1* 0B1\n  device 1 │ 1F1* 1B1  1F0  1B0*")


def test_what_is_missing_and_what_is_large_has_no_picture() -> None:
    assert told(Schedule.from_csv("0F0,0F2,0B0,0B2\n")).endswith("micro-batch 1")
    large = build_schedule("1f1b", 17, 2)
    assert "│ 0F0" not in told(Schedule.from_rows([[*row, row[0]] for row in large.rows]))
