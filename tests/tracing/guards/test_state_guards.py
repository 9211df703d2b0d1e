"""The guards of a recording: which changes break them, and how a change is reported."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.recorded_reads import Calls, guards_of

LEVEL = 1.0


class Config:
    def __init__(self, level: float) -> None:
        self.level, self.unread = level, 0


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Sequential(nn.Linear(2, 2), nn.ReLU()), nn.Linear(2, 2)
        self.config, self.levels, self.unread = Config(1.0), [1.0, 2.0], 0

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(self.body(x)) * self.config.level * self.levels[0] * LEVEL


def test_nothing_changes_by_itself() -> None:
    assert guards_of(Net(), torch.zeros(3, 2)).hold()


SAME: tuple[Callable[[Any], Any], ...] = (
    lambda net: setattr(net, "unread", 5),
    lambda net: setattr(net, "new", 5),
    lambda net: setattr(net.config, "unread", 5),
    lambda net: setattr(net, "config", Config(float("1"))),
    lambda net: setattr(net, "levels", [float("1"), 2.0]),
    lambda net: net.head.weight.data.add_(1),
    lambda net: net.head.register_forward_hook(lambda *_: None),
)


@pytest.mark.parametrize("number", range(len(SAME)))
def test_changes_that_a_recording_does_not_see(number: int) -> None:
    net = Net()
    guards = guards_of(net, torch.zeros(3, 2))
    SAME[number](net)
    assert guards.hold()
    assert guards.hold()
    assert not guards.changes()


OTHER: dict[str, Callable[[Any], Any]] = {
    "model.config.level": lambda net: setattr(net.config, "level", 2.0),
    "model.levels[0]": lambda net: net.levels.__setitem__(0, 1),
    "model.levels": lambda net: net.levels.append(1.0),
    "model.head": lambda net: setattr(net, "head", nn.Linear(2, 2)),
    "model.head.weight": lambda net: setattr(net.head, "weight", nn.Parameter(torch.ones(2, 2))),
    "model.head.weight.requires_grad": lambda net: net.head.weight.requires_grad_(False),
    "model.body._modules": lambda net: net.body.append(nn.ReLU()),
    "model.body._forward_hooks": lambda net: net.body.register_forward_hook(lambda *_: None),
    "model.body[0]": lambda net: net.body.__setitem__(0, nn.Linear(2, 2)),
    "model.forward": lambda net: setattr(net, "forward", lambda x: x),
}


@pytest.mark.parametrize("label", OTHER)
def test_changes_are_named(label: str) -> None:
    net = Net()
    guards = guards_of(net, torch.zeros(3, 2))
    OTHER[label](net)
    assert not guards.hold()
    names = [change.label for change in guards.changes()]
    expected = {"model.body[0]": "model.body._modules['0']"}.get(label, label)
    assert expected in names, names


def test_a_change_has_the_line_that_reads_it() -> None:
    net = Net()
    guards = guards_of(net, torch.zeros(3, 2))
    net.config.level = 0.5
    (change,) = guards.changes()
    line = Net.forward.__code__.co_firstlineno + 1
    assert str(change) == f"model.config.level: 1.0 -> 0.5, read at test_state_guards.py:{line} in Net.forward"


def test_a_global_is_named_with_its_module(monkeypatch: pytest.MonkeyPatch) -> None:
    guards = guards_of(Net(), torch.zeros(3, 2))
    monkeypatch.setitem(globals(), "LEVEL", 4.0)
    assert [change.label for change in guards.changes()] == [f"LEVEL (global of {__name__})"]


def test_a_counter_that_the_graph_carries_is_no_change() -> None:
    net = Calls()
    guards = guards_of(net, torch.zeros(3, 2))
    net.calls = 17
    assert guards.hold()
