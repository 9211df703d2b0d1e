from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from pipecompile.ir.plan import Plan
from pipecompile.ir.program_text import parse_program

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
