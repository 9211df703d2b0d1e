"""A stand-in for the compiler: the command line is tested for what it passes on and what it makes of the answer."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from torch import nn
from typer.testing import CliRunner

import pipecompile
from pipecompile.cli import app
from pipecompile.cli.training_trial import eager_step
from pipecompile.ir import Program
from pipecompile.ir.plan import Plan, StageSummary
from pipecompile.schedules import build_schedule
from pipecompile.show import dump
from pipecompile.simulation.simulator import simulate

MODELS = """
import torch
from torch import nn

print("a model that talks")

def small():
    print("and goes on talking")
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))

def with_dropout():
    return nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 2))

def needs(width):
    return nn.Linear(width, width)

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide, self.narrow = nn.Linear(16, 64), nn.Linear(64, 16)
    def forward(self, x):
        return x + self.narrow(torch.tanh(self.wide(x)))

def blocks():
    return nn.Sequential(Block(), Block(), Block(), nn.Linear(16, 4))

class Nested:
    ready = nn.Linear(3, 3)
    text = "no model"
"""


@dataclass
class FakePipe:
    """Runs the model as a plain micro-batched loop, `factor` off when a test wants it to be wrong."""

    model: nn.Module
    schedule: Any
    plan: Plan
    devices: tuple[str, ...]
    factor: float = 1.0
    measured: None = None
    program: Program | None = None

    def step(self, *args):
        loss = eager_step(self.model, args, self.schedule.n_microbatches)
        for parameter in self.model.parameters():
            parameter.grad *= self.factor
        return loss

    def simulate(self):
        return simulate(
            self.schedule, forward=1e-3, input_grad=1e-3, weight_grad=1e-3, transfer=1e-4, saved_bytes=2.0**20
        )

    def dump(self, directory):
        return dump(directory, plan=self.plan, schedule=self.schedule)


@dataclass
class FakeCompiler:
    """Stands in for `pipecompile.compile`; keeps what it was called with."""

    factor: float = 1.0
    error: Exception | None = None
    calls: list[dict[str, Any]] = field(default_factory=list)

    def __call__(self, model, n_stages, **options):
        self.calls.append({"model": model, "n_stages": n_stages, **options})
        if self.error:
            raise self.error
        schedule = build_schedule(options["schedule"], n_stages, options["n_microbatches"] or 4)
        stages = tuple(
            StageSummary(i, "cpu", f"{i}", f"{i}", 1, 72, 288.0, 1e-3, 2e-3, 64.0, 32.0, 0, 0) for i in range(n_stages)
        )
        places = tuple(range(n_stages))
        plan = Plan(
            "f", n_stages, ("cpu",) * n_stages, places, {"a": 0}, (), stages, 3e-3, 3e-3, "optimal", "dp", "analytic"
        )
        return FakePipe(model, schedule, plan, plan.devices, self.factor)


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str

    @property
    def json(self):
        """stdout, which must be one JSON object on one line and nothing else."""
        assert self.out.count("\n") == 1, self.out
        return json.loads(self.out)


@pytest.fixture
def compiler(monkeypatch):
    fake = FakeCompiler()
    monkeypatch.setattr(pipecompile, "compile", fake, raising=False)
    monkeypatch.setattr(pipecompile, "build_schedule", build_schedule, raising=False)
    monkeypatch.setattr(pipecompile, "simulate", simulate, raising=False)
    return fake


@pytest.fixture
def models(tmp_path, monkeypatch) -> Path:
    """The current directory, with a module `mymodels` in it."""
    (tmp_path / "mymodels.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", ["", *__import__("sys").path])
    monkeypatch.delitem(__import__("sys").modules, "mymodels", raising=False)
    __import__("importlib").invalidate_caches()
    return tmp_path


def call(*words: str) -> Outcome:
    """The command line, with whatever `pipecompile.compile` is now."""
    result = CliRunner().invoke(app, [str(word) for word in words])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return Outcome(result.exit_code, result.stdout, result.stderr)


@pytest.fixture
def cli(compiler):
    return call


@pytest.fixture
def real(monkeypatch):
    """The command line with the compiler itself, and no GPUs."""
    monkeypatch.setattr("pipecompile.settings.machine_settings.accelerator_indices", lambda: range(0))
    return call
