"""The attributes of one object: found on the instance, in a table, on the class, or absent."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import pipecompile as pc
from pipecompile.tracing.guards.object_state import class_attribute
from pipecompile.tracing.guards.read_state import ABSENT, ReadState
from tests.support.recorded_reads import Calls, state_of


class Slotted:
    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 3.0


class Net(nn.Module):
    gain = 2.0

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.drop, self.slotted = nn.Linear(2, 2), nn.Dropout(0.5), Slotted()
        self.off = nn.Dropout(0.0)
        self.plain = 1.0

    @property
    def doubled(self) -> float:
        return 2 * self.plain

    def forward(self, x: torch.Tensor) -> Any:
        extra = self.missing if hasattr(self, "missing") else 0.0
        return self.drop(self.off(self.layer(x))) * self.gain * self.doubled * self.slotted.value + extra


def state() -> ReadState:
    return state_of(Net(), torch.zeros(3, 2))


def test_attributes_are_found_where_python_finds_them() -> None:
    values = state().values
    assert values["model.plain"] == 1.0
    assert values["Net.gain"] == 2.0
    assert values["Net.doubled"] is property
    assert values["model.slotted.value"] == 3.0
    assert values["model.missing"] is ABSENT
    assert isinstance(values["model.layer.weight"], nn.Parameter)


def test_modes_of_registered_modules_and_floats_of_dropout_are_not_part_of_the_state() -> None:
    values = state().values
    assert "model.training" not in values
    assert "model.drop.training" not in values
    assert "model.drop.p" not in values
    assert "model.drop.inplace" in values
    assert "model.off.p" in values  # a dropout of 0 that becomes another one begins to draw


def test_what_the_forward_writes_is_left_out() -> None:
    assert "model.calls" not in state_of(Calls(), torch.zeros(3, 2)).values


def test_class_attributes_of_python_itself_are_none() -> None:
    assert class_attribute(Net, "__doc__") is None
    assert class_attribute(Net, "gain") == 2.0


class Deciding(nn.Module):
    """Leaves a term of the loss that it does not have before its first call, and is kept whole for what it decides."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        if y.sum() > 1e9:
            y = y * 2
        self.term = y.square().mean()
        return y


class WithTerms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = Deciding(), Deciding()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.two(self.one(x))
        return y.square().mean(1) + self.one.term + self.two.term


def test_what_a_forward_leaves_for_the_first_time_is_no_change_of_what_it_reads(
    recwarn: pytest.WarningsRecorder,
) -> None:
    model, x = WithTerms(), torch.randn(4, 2)
    pipe = pc.compile(
        model, 2, example_args=(x,), n_microbatches=2, loss_fn=torch.mean, devices=["cpu"] * 2, cost="analytic"
    )
    for _ in range(2):
        pipe.step(x)
    assert pipe.explain().traces == 1
    assert not [one for one in recwarn if "changed in a step" in str(one.message)]
