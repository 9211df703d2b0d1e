from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from program_strategies import schedules

from pipecompile.errors import PipecompileError, ScheduleError
from pipecompile.ir import (
    HOST,
    Action,
    Kind,
    Operand,
    Route,
    Schedule,
    Value,
)
from pipecompile.schedules import build_schedule


@given(schedules())
def test_a_schedule_parses_back(schedule: Schedule) -> None:
    again = Schedule.from_csv(str(schedule))
    assert (again, again.name) == (schedule, "csv")


def test_a_device_without_actions_keeps_its_row() -> None:
    schedule = Schedule(2, 1, (0, 2), ((Action(0, Kind.FORWARD, 0),), (), (Action(1, Kind.FORWARD, 0),)))
    assert str(schedule) == "0F0\n,\n1F0\n"
    assert Schedule.from_csv(str(schedule)) == schedule


def test_rows_may_be_written_by_hand() -> None:
    rows = [["0F0", Action(0, Kind.BACKWARD, 0)], ["1F0", "1B0"]]
    assert Schedule.from_rows(rows, "mine") == build_schedule("gpipe", 2, 1)
    assert Schedule.from_rows(rows, "mine").name == "mine"


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([["0F0", "0B0"], ["1F0", "1X0"]], r"'1X0' is not an action\n  where  row 1, cell 2\n"),
        ([["0F0", "(0F1;0X0)OVERLAP_F_B"]], r"'0X0' is not an action\n  where  row 0, cell 2\n"),
        ([["0F0"], [3]], r"3 is not an action\n  where  row 1, cell 1\n"),
        ([["0F0"], [("1F0", None)]], r"\('1F0', None\) is not an action\n  where  row 1, cell 1\n"),
        ([["0F0", "0B0"], ["0F1", "0B1"]], r"on device 1\n  where  row 1, action 0F1\n"),
        (["0F0"], r"rows=\['0F0'\] are not rows of actions\n  try"),
        (3, r"rows=3 are not rows of actions\n  try"),
    ],
)
def test_what_is_wrong_in_rows_is_named_by_its_place(rows: Any, message: str) -> None:
    with pytest.raises(PipecompileError, match=message):
        Schedule.from_rows(rows)


def test_a_stage_on_two_devices_of_a_text_has_its_line() -> None:
    with pytest.raises(ScheduleError, match=r"where  row 1 \(line 2\), action 0F1"):
        Schedule.from_csv("0F0,0B0\n0F1,0B1\n")


def test_data_survives_copying_and_pickling() -> None:
    for thing in (build_schedule("1f1b", 2, 2), Route("h", HOST, (0, HOST), 8.0), Operand(Value("h", 0, 1), 2)):
        assert copy.deepcopy(thing) == thing == pickle.loads(pickle.dumps(thing))
        assert hash(copy.deepcopy(thing)) == hash(thing)


def test_a_schedule_is_a_file(tmp_path: Path) -> None:
    schedule = build_schedule("zbv", 4, 3)
    schedule.save(tmp_path / "mine.csv")
    assert Schedule.load(tmp_path / "mine.csv") == schedule
    assert Schedule.load(str(tmp_path / "mine.csv")).name == "mine"
    with pytest.raises(ScheduleError, match=r"cannot be read\n  where  .*none\.csv"):
        Schedule.load(tmp_path / "none.csv")


def test_repr_is_one_short_line() -> None:
    assert repr(build_schedule("1f1b", 2, 4)) == "Schedule('1f1b', n_stages=2, n_microbatches=4, n_devices=2)"


def test_backwards_are_split_or_whole() -> None:
    assert build_schedule("zb-h1", 2, 2).is_split
    assert not build_schedule("1f1b", 2, 2).is_split
