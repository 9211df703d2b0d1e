"""The hook between phases: seconds and a line per phase, in the order of the phases, and the verifier of each result."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pipecompile.driver.phase_log import PhaseLog
from pipecompile.ir.plan import Plan
from pipecompile.ir.program_text import parse_program


def fail(result: int) -> None:
    raise ValueError(f"illegal {result}")


def test_a_phase_gives_its_result_verified_and_described() -> None:
    log, verified = PhaseLog(), []
    assert log.run("add", int.__add__, 2, 3, verify=verified.append, describe=lambda result: f"{result} nodes") == 5
    assert verified == [5]
    assert log.lines == {"add": "5 nodes"}
    assert 0 <= log.seconds["add"] < 1


def test_an_illegal_result_has_seconds_and_no_line() -> None:
    log = PhaseLog()
    with pytest.raises(ValueError, match="illegal 5"):
        log.run("add", int.__add__, 2, 3, verify=fail)
    assert list(log.seconds) == ["add"]
    assert not log.lines


def test_a_phase_that_fails_leaves_no_entry() -> None:
    log = PhaseLog()
    with pytest.raises(ZeroDivisionError):
        log.run("divide", int.__floordiv__, 1, 0)
    assert not log.seconds
    assert str(log) == "\n"


def test_the_text_has_a_line_per_phase_in_order_and_a_repeated_phase_once() -> None:
    log = PhaseLog()
    log.run("record", int)
    log.run("lower", int, describe=lambda _: "first")
    log.run("lower", int, describe=lambda _: "second")
    first, second = str(log).splitlines()
    assert re.fullmatch(r"record {5} +\d+\.\d{3} ms", first)
    assert re.fullmatch(r"lower {6} +\d+\.\d{3} ms   second", second)


def test_seconds_are_shown_as_milliseconds() -> None:
    assert str(PhaseLog({"cost": 1.5}, {"cost": "2 sizes"})) == "cost           1500.000 ms   2 sizes\n"


def test_phases_are_logged_for_debugging(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "pipecompile"):
        PhaseLog().run("split", int, describe=lambda _: "2 stages")
        PhaseLog().run("partition", int)
        PhaseLog().run("lower", int)
        PhaseLog().run("bind", int)
    assert re.fullmatch(r"split: \d\.\d{3} s, 2 stages", caplog.messages[0])
    names = [record.name for record in caplog.records]
    assert names == [f"pipecompile.{name}" for name in ("trace", "partition", "schedule", "run")]


SCRIPT = """
import torch
from torch import nn
import pipecompile as pc

model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
x = torch.randn(8, 4)
pipe = pc.compile(model, 2, example_args=(x,), n_microbatches=4, loss_fn=nn.functional.mse_loss, cost="analytic")
pipe.step(x, target=x)
"""


def artifacts(text: str) -> dict[str, str]:
    """Return the artifacts of a trace by name: a line `... {json}`, and the text in the lines below it, after a tab."""
    found: dict[str, str] = {}
    name = None
    for line in text.splitlines():
        if line.startswith("\t"):
            if name is not None:
                found[name] += line[1:] + "\n"
            continue
        record = json.loads(line[line.index("{") :])
        name = record.get("artifact", {}).get("name")
        if name is not None:
            found[name] = ""
    return found


def run(folder: Path, **environment: str) -> None:
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT]
    subprocess.run(command, check=True, cwd=folder, env={**os.environ, **environment, "PYTHONPATH": str(Path.cwd())})


def test_every_level_is_an_artifact_of_the_structured_trace(tmp_path: Path) -> None:
    run(tmp_path, TORCH_TRACE=str(tmp_path / "trace"))
    (file,) = (tmp_path / "trace").iterdir()
    found = artifacts(file.read_text())
    assert {"pipecompile_graph", "pipecompile_plan", "pipecompile_program"} <= found.keys()
    program = parse_program(found["pipecompile_program"])
    assert (program.n_stages, program.n_microbatches) == (2, 4)
    assert Plan.from_json(found["pipecompile_plan"]).n_stages == 2


def test_nothing_is_written_without_a_directory(tmp_path: Path) -> None:
    run(tmp_path)
    assert list(tmp_path.iterdir()) == []
