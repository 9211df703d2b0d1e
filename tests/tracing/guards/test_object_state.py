"""The attributes of one object: found on the instance, in a table, on the class, or absent."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

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
