"""Slices of micro-batches: their text, their counts, and who refuses them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import pipecompile as pc
from pipecompile.errors import PipecompileError, ScheduleError, VerifyError
from pipecompile.ir import NO_MICROBATCH, NO_SLICE, Action, Instruction, Kind, Op, Program, Schedule
from pipecompile.ir.periodic import PeriodicSchedule
from pipecompile.ir.program_text import parse_instruction
from pipecompile.ir.slices import check_whole, checked_slices, count_text, first_slice, in_slices, unit_text
from pipecompile.passes import lower
from pipecompile.passes.offloading import offload_to_fit
from pipecompile.planning.alternatives import unit_what_if
from pipecompile.schedules.periods import build_periodic, find_period

TWO = "0F0.0,0F0.1,0B0.1,0B0.0\n1F0.0,1F0.1,1B0.1,1B0.0\n"


def test_the_text_is_read_and_written() -> None:
    schedule = Schedule.from_csv(TWO)
    assert str(schedule) == TWO
    assert (schedule.n_microbatches, schedule.n_slices, schedule.n_units) == (1, 2, 2)
    assert repr(schedule) == "Schedule('csv', n_stages=2, n_microbatches=1, n_devices=2, n_slices=2)"
    assert schedule.rows[1][3] == Action(1, Kind.BACKWARD, 0, 0)
    assert Schedule.from_rows([["0F0.0", "0F0.1"]]) == Schedule.from_csv("0F0.0,,0F0.1")
    assert Schedule.from_rows([["0F0.0", "0F0.1"]]) != Schedule.from_rows([["0F0", "0F1"]])
    assert schedule != replace(schedule, n_slices=1)


def test_whole_micro_batches_are_written_as_ever() -> None:
    schedule = Schedule.from_csv("0F0,0B0\n")
    assert (str(schedule), schedule.n_slices, schedule.n_units) == ("0F0,0B0\n", 1, 1)
    assert "slices" not in repr(schedule)


def test_other_cells_have_slices_too() -> None:
    text = "0UNSHARD,0F0.0,0F0.1,0I0.1,(0F1.0;0I0.0)OVERLAP_F_B,0F1.1,0R1.1,0I1.1,0OFFLOAD1.0,0RESHARD,0REDUCE_GRAD\n"
    assert str(Schedule.from_csv(text)) == text
    assert Schedule.from_csv("(0F0.0;0F0.1)x3+1").rows == Schedule.from_csv("0F0.0,0F0.1,0F1.0,0F1.1,0F2.0,0F2.1").rows


@pytest.mark.parametrize(
    "text", ["0F0.", "0F.1", "0F0.1.2", "0F0.-1", "0F0.01234567890", "0UNSHARD.1", "0F0 .1", "0SEND_F0.1"]
)
def test_texts_that_are_no_actions(text: str) -> None:
    with pytest.raises(ScheduleError, match="is not an action"):
        Schedule.from_csv(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0.0,0F0.1,0B0", r"0F0\.0 has a slice and 0B0 has none\n  why    all or none are divided"),
        ("0F0,0B0\n1F0.1,1B0.1", r"1F0\.1 has a slice and 0F0 has none"),
        ("0F0.0,0F0.2", r"no action is of slice 1\n  where  0F0\.2\n  why    slices 0 to 2 are expected"),
        ("0F0.1", "no action is of slice 0"),
        ("0F0.0,0B0.0", r"0F0\.0 is of the only slice\n  why    one slice is the whole micro-batch\n  try    0F0"),
        ("0F0.999999999", "the text has 1 action and cannot have 1,000,000,000 slices of micro-batches"),
        ("0F0.0,0F60.60", "the text has 2 actions and cannot have 3,721 slices of micro-batches"),
        ("0F0.0,0F0.1,0B0.1,0W0.1,0B0.0", r"0B0\.1 and 0W0\.1 are both there\n.*\n.*\n  try    0I0\.1 instead of 0B0\.1"),
    ],
)  # fmt: skip
def test_rows_that_are_not_all_slices_are_refused(text: str, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        Schedule.from_csv(text)


def test_small_helpers() -> None:
    schedule = pc.build_schedule("seq1f1b", 2, 3, n_slices=2)
    assert count_text(schedule) == "3 micro-batches of 2 slices"
    assert count_text(pc.build_schedule("1f1b", 2, 3)) == "3 micro-batches"
    assert [unit_text(unit, 2) for unit in range(4)] == ["0.0", "0.1", "1.0", "1.1"]
    assert unit_text(3, 1) == "3"
    assert first_slice(schedule.rows) == Action(0, Kind.FORWARD, 0, 0)
    assert first_slice(pc.build_schedule("1f1b", 2, 3).rows) is None
    assert checked_slices(schedule.rows, 3) == 2
    assert Action(1, Kind.FORWARD, 3, 1).unit(4) == 13
    assert Action(1, Kind.FORWARD, 3).unit(1) == 3
    assert Action(1, Kind.FORWARD, 3, 1).later(2) == Action(1, Kind.FORWARD, 5, 1)
    assert Action(0, Kind.FORWARD, 3).slice == NO_SLICE
    check_whole(pc.build_schedule("seq1f1b", 2, 3, n_slices=1), "nothing")


# -- who refuses ------------------------------------------------------------------------------------------------------


SLICED = pc.build_schedule("seq1f1b", 2, 4, n_slices=2)

REFUSED: dict[str, Callable[[], object]] = {
    "insert_offload": lambda: pc.insert_offload(SLICED),
    "offload_to_fit": lambda: offload_to_fit(SLICED, 1.0, saved_bytes=1.0),
    "find_period": lambda: find_period(SLICED),
    "build_periodic": lambda: build_periodic("seq1f1b", 2, 40),
    "check_order": lambda: pc.check_order(SLICED),
    "repair_order": lambda: pc.repair_order(SLICED),
    "unit_what_if": lambda: unit_what_if(SLICED),
    "PeriodicSchedule.from_csv": lambda: PeriodicSchedule.from_csv("(0F0.0;0F0.1)x4+1"),
    "PeriodicSchedule.from_json": lambda: PeriodicSchedule.from_json(periodic_text()),
    "parse_instruction": lambda: parse_instruction("0F0.1 ->"),
    "compile": lambda: compiled(SLICED),
    "compile of a name": lambda: compiled("seq1f1b"),
    "compile of a function": lambda: compiled(lambda *counts: pc.build_schedule("terapipe", *counts[:2], n_slices=2)),
}


def periodic_text() -> str:
    data = json.loads(pc.build_periodic("1f1b", 2, 20).to_json())
    return json.dumps(data | {"period": ["0F0.1 0B0.1", "1F0.1 1B0.1"]})


def compiled(schedule: Any, **options: Any) -> pc.Pipeline:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.randn(8, 4)
    return pc.compile(model, 2, example_args=(x,), schedule=schedule, cost="analytic", **options)


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_slices_refuses_them(name: str) -> None:
    with pytest.raises(ScheduleError, match=r"slice|divides micro-batches along the sequence") as caught:
        REFUSED[name]()
    assert caught.value.why


def test_the_hint_can_be_pasted() -> None:
    for schedule in (SLICED, pc.build_schedule("terapipe", 6, 3, n_devices=3)):
        with pytest.raises(ScheduleError) as caught:
            pc.check_order(schedule)
        whole = eval(caught.value.hint, {"pc": pc})
        assert (whole.n_stages, whole.n_devices, whole.n_microbatches) == (
            schedule.n_stages, schedule.n_devices, schedule.n_microbatches,
        )  # fmt: skip
        lower(whole)


def test_compile_refuses_a_file_and_keeps_what_it_has(tmp_path: Path) -> None:
    SLICED.save(tmp_path / "mine.csv")
    with pytest.raises(ScheduleError, match="schedule 'mine', of 2 slices per micro-batch, is given without loss_fn"):
        compiled(tmp_path / "mine.csv")
    lower(SLICED).save(tmp_path / "mine.txt")
    with pytest.raises(ScheduleError, match="such a program is made from a schedule"):
        compiled(tmp_path / "mine.txt")
    pipe = compiled("1f1b", has_aux=True, loss_fn=lambda out: (out.sum(), 0))
    with pytest.raises(ScheduleError, match="'seq1f1b', of 4 slices per micro-batch, is given together with has_aux"):
        pipe.reschedule("seq1f1b")
    with pytest.raises(ScheduleError, match="of 2 slices per micro-batch, is given together with has_aux"):
        pipe.reschedule(SLICED)
    assert pipe.schedule.name == "1f1b"


def test_one_slice_runs() -> None:
    pipe = compiled(pc.build_schedule("seq1f1b", 2, 4, n_slices=1), loss_fn=lambda out: out.sum())
    assert pipe.step(torch.randn(8, 4)).ndim == 0


def test_a_pass_of_the_user_cannot_make_slices() -> None:
    with pytest.raises(ScheduleError, match="it has other n_slices"):
        compiled("1f1b", loss_fn=lambda out: out.sum(), passes=[pc.UserPass(lambda _: SLICED, before="compute")])


def test_programs_and_periodic_schedules_made_by_hand_have_none() -> None:
    action = Action(0, Kind.FORWARD, 0, 1)
    program = Program(1, 1, (0,), (), ((Instruction(Op.COMPUTE, action=action),),))
    with pytest.raises(VerifyError, match=r"0F0\.1 is on a slice, and a program numbers the slices"):
        pc.verify(program)
    with pytest.raises(VerifyError, match=r"0F0\.1 is on a slice, and a periodic schedule has whole micro-batches"):
        pc.verify(PeriodicSchedule(1, (0,), ((),), ((action,),), ((),), 4, 1))


def test_actions_of_a_program_are_read_as_those_of_slices() -> None:
    assert in_slices(Action(1, Kind.BACKWARD, 5), 4) == Action(1, Kind.BACKWARD, 1, 1)
    assert in_slices(Action(1, Kind.BACKWARD, 5), 1) == Action(1, Kind.BACKWARD, 5)
    unshard = Action(1, Kind.UNSHARD, NO_MICROBATCH)
    assert in_slices(unshard, 4) == unshard


def test_searches_leave_slices_out() -> None:
    assert pc.auto_schedule(2, 4).n_slices == 1
    with pytest.raises(PipecompileError, match="slice_bytes is given without slices"):
        pc.auto_schedule(2, 4, slice_bytes=[0.5, 0.5])
    with pytest.raises(PipecompileError, match="slice_seconds is given without slices"):
        pc.simulate(lower(pc.build_schedule("1f1b", 2, 4)), slice_seconds=[0.5, 0.5])


def test_passes_on_schedules_keep_slices() -> None:
    for schedule in (
        pc.insert_overlap(SLICED),
        pc.insert_sharding(SLICED),
        pc.shard_to_fit(SLICED, 1e9, unsharded_bytes=1.0),
    ):
        assert schedule.n_slices == 2
        pc.verify(schedule)
        assert Schedule.from_csv(schedule.to_csv()) == schedule
    assert pc.insert_overlap(SLICED).overlaps
