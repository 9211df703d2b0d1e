"""Actions are ranges of torch's profiler, with the names that torch.distributed.pipelining gives them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import pipecompile as pc


@pytest.mark.smoke
def test_a_kineto_trace_has_every_action_of_a_step_as_a_user_annotation(tmp_path: Path) -> None:
    x = torch.randn(6, 4)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    pipe = pc.compile(model, 2, devices=["cpu"] * 2, n_microbatches=3, loss_fn=mse_loss, schedule="zb-h1", cost="analytic", dispatch="inline")  # fmt: skip
    pipe.step(x, target=x)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        pipe.step(x, target=x)
    pipe.step(x, target=x)
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text(encoding="utf-8"))["traceEvents"]
    named = {
        event["name"]: event
        for event in events
        if event.get("cat") == "user_annotation" and event["name"].startswith("PP:")
    }
    assert named.keys() == {f"PP:{action}" for row in pipe.schedule.rows for action in row}
    order = sorted((event["ts"], name) for name, event in named.items())
    assert [name for _, name in order if name.startswith("PP:0")] == [
        f"PP:{action}" for action in pipe.schedule.rows[0]
    ]
