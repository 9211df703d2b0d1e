from __future__ import annotations

import copy
import pickle
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from program_strategies import schedules

from pipecompile.errors import ScheduleError
from pipecompile.ir import (
    HOST,
    Action,
    Instruction,
    Kind,
    Op,
    Operand,
    Route,
    Schedule,
    Tie,
    Value,
    chain,
    part_of,
    recipe,
    saved,
    weight_saved,
)
from pipecompile.schedules import build_schedule


@given(st.builds(Action, st.integers(0, 10**9 - 1), st.sampled_from(Kind), st.integers(0, 10**9 - 1)))
def test_an_action_parses_back(action: Action) -> None:
    assert Action.parse(str(action)) == action


@pytest.mark.parametrize(
    "text", ["2F0garbage", "2X0", "", "F0", "2F", "2f0", " 2F0", "2F0\n", "-1F0", "2F٣", "2" * 5000 + "F0"]
)
def test_anything_else_is_no_action(text: str) -> None:
    with pytest.raises(ScheduleError, match="is not an action"):
        Action.parse(text)


@given(schedules())
def test_a_schedule_parses_back(schedule: Schedule) -> None:
    again = Schedule.from_csv(str(schedule))
    assert (again, again.name) == (schedule, "csv")


def test_empty_cells_are_idle_ticks() -> None:
    assert Schedule.from_csv("0F0,,0B0,\n,1F0, ,1B0,,\n") == build_schedule("gpipe", 2, 1)


def test_a_device_without_actions_keeps_its_row() -> None:
    schedule = Schedule(2, 1, (0, 2), ((Action(0, Kind.FORWARD, 0),), (), (Action(1, Kind.FORWARD, 0),)))
    assert str(schedule) == "0F0\n\n1F0\n"
    assert Schedule.from_csv(str(schedule)) == schedule


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,0B0\n1F0,2F0garbage\n", "'2F0garbage' is not an action\n  where  row 1, column 1"),
        ("0F0,,2X0\n", "'2X0' is not an action\n  where  row 0, column 2"),
        (
            "0F0,x\n1Y0,1F0\n",
            "'x' is not an action\n  where  row 0, column 1\n         row 1, column 0: '1Y0' is not an action",
        ),
        ("x,y,z,a,b,c,d,e,f,g,h\n", "row 0, column 8: 'f' is not an action\n         and 2 more\n  why "),
        ("0F0,0REDUCE_GRADX\n", "'0REDUCE_GRADX' is not an action\n  where  row 0, column 1"),
        ("0F0,0SEND_F\n", "'0SEND_F' is not an action"),
        ("0F0,0UNSHARD0\n", "'0UNSHARD0' is not an action"),
        ("0F0,(0F1;0B0)OVERLAP\n", "is not an action\n  where  row 0, column 1"),
        ("0F0,(0F1;0B)OVERLAP_F_B\n", "'0B' is not an action\n  where  row 0, column 1"),
        ("", "there is no action"),
        (",,\n\n", "there is no action"),
        ("0SEND_F0\n", "there is no action"),
        ("0F0\n1F0,0B0\n", "stage 0 is on device 0 and on device 1\n  where  row 1, action 0B0"),
        ("0F0,2F0\n", "no row holds an action of stage 1\n  why    stages 0 to 2 are expected"),
        ("1F0\n", "no row holds an action of stage 0"),
        ("999999999F0\n", "no row holds an action of stage 0"),
    ],
)
def test_what_cannot_be_read_is_named_with_its_place(text: str, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        Schedule.from_csv(text)


def test_rows_may_be_written_by_hand() -> None:
    rows = [["0F0", Action(0, Kind.BACKWARD, 0)], ["1F0", "1B0"]]
    assert Schedule.from_rows(rows, "mine") == build_schedule("gpipe", 2, 1)
    assert Schedule.from_rows(rows, "mine").name == "mine"


def test_communication_in_a_file_is_left_out_and_what_overlaps_follows_each_other() -> None:
    text = """\
0UNSHARD,0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0WAIT_SEND_F0,0RECV_B1,0B1,0REDUCE_GRAD,0WAIT_REDUCE_GRAD,0RESHARD
1RECV_F0,1F0,1RECV_F1,(1F1;1B0)OVERLAP_F_B,1SEND_B0,1B1,1SEND_B1,1WAIT_SEND_B1
"""
    assert Schedule.from_csv(text).to_csv().splitlines() == ["0F0,0F1,0B0,0B1", "1F0,1F1,1B0,1B1"]


def test_b_beside_w_is_the_input_gradient_in_files_that_know_no_i() -> None:
    """torch up to 2.5 had F, B and W."""
    assert Schedule.from_csv("0F0,0F1,0B0,0W0,0B1\n").to_csv() == "0F0,0F1,0I0,0W0,0B1\n"
    assert Schedule.from_csv("0F0,0F1,0B0,0W0,0I1,0W1\n").to_csv() == "0F0,0F1,0B0,0W0,0I1,0W1\n"


def test_how_values_and_instructions_are_written() -> None:
    grad = Operand(Value("h", 3, HOST), 1)
    forward = Instruction(Op.COMPUTE, (Operand(Value("h", 3)),), (Operand(saved(1, 3)),), Action(1, Kind.FORWARD, 3))
    assert str(forward) == "1F3 h#3 -> @1#3"
    assert str(Instruction(Op.COMPUTE, action=Action(1, Kind.WEIGHT_GRAD, 3))) == "1W3 ->"
    assert str(Instruction(Op.SEND, (grad,), peer=2)) == "SEND h'host#3[1] to 2"
    assert str(Instruction(Op.RECV, (), (grad,), peer=HOST)) == "RECV h'host#3[1] from host"
    assert str(Instruction(Op.FREE, (grad,))) == "FREE h'host#3[1]"
    assert str(Instruction(Op.REDUCE, tie="w")) == "REDUCE w"
    assert str(Action(1, Kind.RECOMPUTE, 3)) == "1R3"
    assert [str(make(1, 3)) for make in (saved, weight_saved, recipe)] == ["@1#3", "@1.w#3", "@1.r#3"]


def test_what_i_leaves_for_w_is_part_of_what_was_saved() -> None:
    assert part_of(weight_saved(1, 3)) == saved(1, 3)
    assert [part_of(value) for value in (saved(1, 3), recipe(1, 3), Value("fc.w", 3))] == [None, None, None]


def test_a_tie_lives_with_its_first_stage() -> None:
    tie = Tie("w", (0, 3, 5), 8.0)
    assert str(tie) == "tie w: 0 3 5, 8 bytes"
    assert tie.devices((1, 0, 0, 1, 0, 2)) == (1, 2)


def test_a_chain_hands_one_value_from_each_stage_to_the_next() -> None:
    assert [str(route) for route in chain(3)] == [
        "route v0: 0 -> 1, 0 bytes, gradient",
        "route v1: 1 -> 2, 0 bytes, gradient",
    ]
    assert chain(1) == ()


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
