"""The walk along what a recording read: containers, functions, closures, globals, classes and modules."""

from __future__ import annotations

import functools
import os
import sys
import time
import types
from collections import deque
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import pipecompile as pc
from tests.support.recorded_reads import state_of

TEMPERATURE = 2.0
UNREAD = 3.0
TABLE = {"scale": 1.5}


class Settings:
    gain = 1.25
    unread = 0


def scaled(x: torch.Tensor, by: float = 3.0, *, shift: float = 0.5) -> Any:
    return x * by + shift


def around(power: float) -> Any:
    def inner(x: torch.Tensor) -> Any:
        return x * power

    return inner


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = [nn.Linear(2, 2)]
        self.sizes, self.queue, self.space = {"a": (1, 2.5)}, deque([7.0]), SimpleNamespace(z=4.0)
        self.act, self.part, self.numbers = around(2.5), functools.partial(scaled, by=0.5), np.ones(2)
        self.steps, self.large = iter([1, 2]), np.zeros(1 << 18)

    def forward(self, x: torch.Tensor) -> Any:
        h = self.layers[0](x) * TEMPERATURE * TABLE["scale"] * Settings.gain * self.sizes["a"][1] + self.queue[0]
        h = scaled(self.part(self.act(h))) + self.space.z + float(self.numbers[0]) + float(os.environ.get("SHIFT", "0"))
        assert self.steps is not None
        assert self.large is not None
        return F.relu(h)


def test_every_kind_of_value_has_a_label() -> None:
    state = state_of(Net(), torch.zeros(3, 2))
    values = state.values
    module = __name__
    for label, value in {
        "model.sizes['a'][1]": 2.5, "model.queue[0]": 7.0, "model.space.z": 4.0, f"TEMPERATURE (global of {module})": 2.0,
        f"TABLE (global of {module})['scale']": 1.5, "Settings.gain": 1.25, "defaults of scaled[0]": 3.0,
        "keyword defaults of scaled['shift']": 0.5, "power (variable around around.<locals>.inner)": 2.5,
    }.items():  # fmt: skip
        assert values[label] == value, label
    assert values["torch.nn.functional.relu"] is F.relu
    assert "model.layers[0].weight" in values
    assert "the environment variables" in values
    assert "model.part, dict['by']" in values


def test_what_no_code_reads_is_left_out() -> None:
    values = state_of(Net(), torch.zeros(3, 2)).values
    assert not any("UNREAD" in label or "Settings.unread" in label for label in values)


def test_what_cannot_be_guarded_is_a_risk() -> None:
    risks = state_of(Net(), torch.zeros(3, 2)).risks
    assert set(risks) == {"model.steps", "model.large"}


def test_a_clock_is_a_risk_with_its_line() -> None:
    class Timed(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return x * time.perf_counter()

    graph = pc.trace(Timed(), torch.ones(2))
    assert graph.facts.reads is not None
    risks = graph.facts.reads.guards().risks
    line = Timed.forward.__code__.co_firstlineno + 1
    assert f"test_state_reader.py:{line} in" in risks["time.perf_counter"]


class Importing(nn.Module):
    """A module whose code may look through sys.modules, as helpers of transformers do, and whose forward does not run that code."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) if self.training else self.patched(x)

    def patched(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + len([name for name in list(sys.modules) if name == "nothing"])


def test_an_import_between_steps_is_no_change_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = pc.compile(Importing(), 1, loss_fn=F.mse_loss, n_microbatches=2, cost="analytic")
    x = torch.randn(4, 2)
    for name in ("one", "two", "three"):
        pipe.step(x, target=x)
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    assert pipe.explain().traces == 1


class Rescaled:
    def scale(self) -> float:
        return 3.0


@pytest.mark.parametrize("held", [True, False], ids=["in an attribute", "in a closure"])
def test_modules_of_the_user_count_wherever_they_are_held(held: bool) -> None:
    settings = types.ModuleType("settings")
    vars(settings).update(scale=2.0, function=torch.tanh)

    class Scales(nn.Linear):
        settings: types.ModuleType | None = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            read = self.settings if held else settings
            return read.function(super().forward(x)) * read.scale

    model, x = Scales(4, 4), torch.randn(4, 4)
    model.settings = settings if held else None
    pipe = pc.compile(model, 1, example_args=(x,), n_microbatches=1, cost="analytic")
    for change in ({}, {"scale": 3.0}, {"function": torch.relu}):
        vars(settings).update(change)
        assert torch.equal(pipe(x), model(x)), change


def test_bases_of_a_class_count() -> None:
    class Plain(nn.Linear):
        def scale(self) -> float:
            return 2.0

    class Scales(Plain):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * self.scale()

    model, x = Scales(4, 4), torch.randn(4, 4)
    pipe = pc.compile(model, 1, example_args=(x,), n_microbatches=1, cost="analytic")
    assert torch.equal(pipe(x), model(x))
    Scales.__bases__ = (Rescaled, Plain)
    assert torch.equal(pipe(x), model(x))
