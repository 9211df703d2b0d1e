from __future__ import annotations

import copy
import csv
import io
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st
from program_strategies import schedules

from pipecompile.checks import verify
from pipecompile.errors import ScheduleError, VerifyError
from pipecompile.ir import HOST, Action, Instruction, Kind, Op, Operand, Route, Schedule, Value, chain, saved
from pipecompile.schedules import build_schedule

pipelining = pytest.importorskip("torch.distributed.pipelining.schedules")


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
        ("0F0,0REDUCE_GRAD\n", "row 0, column 1\n.*\n  try    keep compute actions only"),
        ("", "the CSV holds no action"),
        (",,\n\n", "the CSV holds no action"),
        ("0F0\n1F0,0B0\n", "stage 0 is on device 0 and on device 1\n  where  row 1, action 0B0"),
        ("0F0,2F0\n", "no row holds an action of stage 1\n  why    stages 0 to 2 are expected"),
        ("1F0\n", "no row holds an action of stage 0"),
        ("999999999F0\n", "no row holds an action of stage 0"),
    ],
)
def test_what_cannot_be_read_is_named_with_its_place(text: str, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        Schedule.from_csv(text)


def torch_order(cls_name: str, n_stages: int, n_microbatches: int) -> str:
    """The CSV that torch's `_dump_csv` writes for one of its schedules, compute actions only."""
    schedule = object.__new__(getattr(pipelining, cls_name))
    schedule._num_stages, schedule._n_microbatches = n_stages, n_microbatches
    order = schedule._get_pipeline_order()
    text = io.StringIO()
    writer = csv.writer(text)
    for rank in sorted(order):
        writer.writerow([action for action in order[rank] if action is None or action.is_compute_op])
    return text.getvalue()


@pytest.mark.parametrize(("n_stages", "n_microbatches"), [(1, 1), (2, 4), (4, 4), (4, 8), (8, 16)])
def test_gpipe_as_torch_writes_it_is_ours(n_stages: int, n_microbatches: int) -> None:
    text = torch_order("ScheduleGPipe", n_stages, n_microbatches)
    assert Schedule.from_csv(text) == build_schedule("gpipe", n_stages, n_microbatches)


@pytest.mark.parametrize(("n_stages", "n_microbatches"), [(2, 4), (4, 4), (4, 8), (8, 16)])
def test_1f1b_as_torch_writes_it_is_ours_but_for_its_last_rank(n_stages: int, n_microbatches: int) -> None:
    """torch 2.15 numbers the forwards of the last rank from 1: it loads, and is refused for F0, which is missing."""
    theirs = Schedule.from_csv(torch_order("Schedule1F1B", n_stages, n_microbatches))
    assert theirs.rows[:-1] == build_schedule("1f1b", n_stages, n_microbatches).rows[:-1]
    with pytest.raises(VerifyError, match=f"stage {n_stages - 1} never runs F for micro-batch 0\n"):
        verify(theirs)


@given(schedules())
def test_torch_reads_our_csv(schedule: Schedule) -> None:
    rows = csv.reader(io.StringIO(schedule.to_csv()))
    read = [[pipelining._Action.from_str(cell) for cell in row] for row in rows]
    assert [[str(action) for action in row] for row in read] == [
        [str(action) for action in row] for row in schedule.rows
    ]
    assert all(action.is_compute_op for row in read for action in row)


def test_how_values_and_instructions_are_written() -> None:
    grad = Operand(Value("h", 3, HOST), 1)
    forward = Instruction(Op.COMPUTE, (Operand(Value("h", 3)),), (Operand(saved(1, 3)),), Action(1, Kind.FORWARD, 3))
    assert str(forward) == "1F3 h#3 -> @1#3"
    assert str(Instruction(Op.COMPUTE, action=Action(1, Kind.WEIGHT_GRAD, 3))) == "1W3 ->"
    assert str(Instruction(Op.SEND, (grad,), peer=2)) == "SEND h'host#3[1] to 2"
    assert str(Instruction(Op.RECV, (), (grad,), peer=HOST)) == "RECV h'host#3[1] from host"
    assert str(Instruction(Op.FREE, (grad,))) == "FREE h'host#3[1]"


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
