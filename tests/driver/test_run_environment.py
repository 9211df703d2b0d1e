"""The facts of a report about the place where a step ran."""

from __future__ import annotations

import platform
import sys
from dataclasses import replace

import pytest
import torch

from pipecompile.driver.run_environment import environment_facts, lines_again, throughput
from pipecompile.schedules import build_schedule


def test_versions_and_threads_are_those_of_this_process() -> None:
    facts = dict(environment_facts(("cpu", "cpu")))
    assert list(facts) == ["torch", "Python", "threads of torch"]
    assert facts["torch"] == torch.__version__
    assert facts["Python"].startswith(platform.python_version())
    assert facts["threads of torch"].startswith(f"{torch.get_num_threads()} on ")


def test_throughput_is_samples_by_seconds() -> None:
    assert dict(throughput(64, 0.5)) == {"samples per second, measured": "128 (64 in a step)"}
    assert not list(throughput(None, 0.5))
    assert not list(throughput(64, 0.0))


def test_the_lines_name_the_command_devices_and_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    schedule = build_schedule("1f1b", 2, 4)
    monkeypatch.setattr(sys, "orig_argv", ["/usr/bin/python3", "train it.py", "--fast"])
    lines = lines_again(("cuda:0", "cuda:1"), schedule, has_run=False).splitlines()
    assert lines[0] == "# python 'train it.py' --fast"
    assert 'compile(model, 2, devices=["cuda:0", "cuda:1"], n_microbatches=4' in lines[2]
    assert 'schedule="1f1b"' in lines[2]
    assert not any("step" in line for line in lines)
    other = replace(schedule, rows=build_schedule("gpipe", 2, 4).rows)
    assert 'schedule="schedule.csv"' in lines_again(("cpu", "cpu"), other, has_run=False)
    monkeypatch.setattr(sys, "orig_argv", ["python", "-c", "..."])
    again = lines_again(("cpu", "cpu"), schedule, has_run=True)
    assert again.startswith("pipe.dump")
    assert 'devices=["cpu"] * 2' in again
    assert "pipe.step(" in again
