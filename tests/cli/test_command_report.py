"""The result of a command: one dict for programs, and blocks of text and tables for people."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from pipecompile.cli.command_report import check_report, schedule_report
from pipecompile.graph.explanation import explain
from pipecompile.schedules import build_schedule
from pipecompile.simulation.simulator import simulate


def unit_report(directory: Path | None = None):
    schedule = build_schedule("1f1b", 2, 2)
    return schedule_report(schedule, simulate(schedule), directory)


def test_a_schedule_has_its_counts_its_picture_and_its_csv():
    report = unit_report()
    summary, grid, csv = report.blocks
    assert summary.splitlines()[0] == (
        "1f1b, 2 stages on 2 devices, 2 micro-batches: makespan 9, bubble 33.3%, span 9 (F = 1, B = 2)"
    )
    assert summary.splitlines()[1] == "most micro-batches in flight per device: 2 1"
    assert grid.splitlines()[1].startswith("dev 0")
    assert csv == "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1"
    assert report.exit_code == 0


def test_the_data_can_be_written_as_json():
    data = json.loads(msgspec.json.encode(unit_report().data))
    assert (data["n_stages"], data["placement"], data["makespan"], data["files"]) == (2, [0, 1], 9, [])
    assert data["peak_in_flight"] == [2, 1]


def test_files_are_written_and_listed(tmp_path):
    report = unit_report(tmp_path)
    assert report.blocks[-1] == "wrote " + " ".join(report.data["files"])
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(Path(path).name for path in report.data["files"])


def test_a_single_device_is_singular():
    schedule = build_schedule("gpipe", 2, 2, n_devices=1)
    assert schedule_report(schedule, simulate(schedule), None).blocks[0].startswith("gpipe, 2 stages on 1 device, ")


@pytest.mark.parametrize(("shape", "code"), [((4, 8), 0), ((4, 9), 3), ((0, 8), 2)])
def test_an_explanation_has_the_exit_code_of_its_failure(shape, code):
    import torch
    from torch import nn

    report = check_report(explain(nn.Sequential(nn.Linear(8, 8)), torch.ones(shape)))
    assert report.exit_code == code
    assert report.data["traced"] == (code == 0)
