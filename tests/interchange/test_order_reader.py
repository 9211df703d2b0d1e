"""The form of a file is found from its text, and names stand for the schedules of frameworks."""

from __future__ import annotations

from pathlib import Path

import pytest

import pipecompile as pc
from pipecompile.errors import InputError, ScheduleError
from pipecompile.interchange.order_reader import read_order

NODES = "[[ScheduledNode(type=F, stage=0, microbatch=0), ScheduledNode(type=BW, stage=0, microbatch=0)]]"


@pytest.mark.parametrize(
    ("text", "source", "first_row"),
    [
        ("0F0,0B0\n", "torch", "0F0,0B0"),
        ("\ufeff0F0,0B0\r\n", "torch", "0F0,0B0"),
        (NODES, "sail-sg", "0F0,0B0"),
        ("EtL\n", "Megatron-LM", "0F0,0B0,0F1,0B1"),
        ("megatron:EtL;microbatches=1", "Megatron-LM", "0F0,0B0"),
        ("deepspeed:TrainSchedule;ranks=1;microbatches=1\n", "DeepSpeed", "0F0,0B0"),
    ],
)
def test_every_form_is_known_by_its_text(tmp_path: Path, text: str, source: str, first_row: str) -> None:
    path = tmp_path / "pipeline.txt"
    path.write_text(text, encoding="utf-8")
    order = pc.read_schedule(path)
    assert order.source == source
    assert str(order).splitlines()[0] == first_row


def test_counts_are_arguments_or_part_of_a_name() -> None:
    order = pc.read_schedule("deepspeed:TrainSchedule", n_ranks=3, n_microbatches=5)
    assert order.name == "deepspeed:TrainSchedule;ranks=3;microbatches=5"
    assert order == pc.read_schedule(order.name)
    assert order.schedule.n_microbatches == 5


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        ("deepspeed:Train", {}, "'Train' is not known"),
        ("deepspeed:TrainSchedule;stages=3", {}, "setting 'stages' is not known"),
        ("deepspeed:TrainSchedule;ranks=many", {}, "ranks='many' is not a whole number"),
        ("deepspeed:TrainSchedule", {"n_ranks": 0}, "n_ranks=0 is not a whole number"),
        ("deepspeed:TrainSchedule", {"n_microbatches": 1.5}, "n_microbatches=1.5 is not a whole number"),
        ("megatron:Et|x|L", {}, "is not a layout"),
        (3, {}, "source=3 is not a path"),
    ],
)
def test_wrong_names_and_counts_are_refused(source: object, options: dict[str, object], message: str) -> None:
    with pytest.raises((InputError, ScheduleError), match=message):
        pc.read_schedule(source, **options)  # type: ignore[arg-type]


def test_a_program_is_no_pipeline_of_another_framework(tmp_path: Path) -> None:
    (path := tmp_path / "program.txt").write_text("program: 1 stage on device 0, 1 micro-batch\ndevice 0\n")
    with pytest.raises(ScheduleError, match=r"a program of pipecompile.*\n  try    pipecompile show program.txt"):
        pc.read_schedule(path)


def test_a_file_has_its_counts_itself(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="the file has its ranks"):
        read_order("0F0,0B0\n", "x", 4)
    with pytest.raises(ScheduleError, match="cannot be read"):
        pc.read_schedule(tmp_path / "missing.csv")
    with pytest.raises(ScheduleError, match="cannot be read"):
        pc.read_schedule(tmp_path)
