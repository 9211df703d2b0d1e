"""Counters that a forward advances: a decision on one is warned of, and a number that wraps is not a counter."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import pipecompile as pc


class Net(nn.Module):
    def __init__(self, count: Callable[[Any], Any]) -> None:
        super().__init__()
        self.layer, self.n, self.half, self.count = nn.Linear(3, 3), 0, 0.0, count

    def forward(self, x: torch.Tensor) -> Any:
        self.count(self)
        return self.layer(x)


def step(model: Any) -> None:
    model.n += 1


def decide(model: Any) -> None:
    model.n += 1
    if model.n > 1000:
        model.layer = nn.Identity()


def show(model: Any) -> None:
    model.n += 2
    print(f"call {model.n}", end="")


def scale(model: Any) -> None:
    model.n, model.half = model.n + 1, (model.n + 1) / 2


def wrap(model: Any) -> None:
    model.n = (model.n + 1) % 4


def saturate(model: Any) -> None:
    model.n = min(model.n + 1, 10)


def given(count: Callable[[Any], Any]) -> tuple[list[str], int]:
    """Return the warnings of a recording, and the counter after two runs."""
    model = Net(count)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        graph = pc.trace(model, torch.randn(2, 3))
    assert model.n == 0
    graph(torch.randn(2, 3))
    graph(torch.randn(2, 3))
    return [str(one.message) for one in caught], model.n


@pytest.mark.parametrize(("count", "total"), [(step, 2), (show, 4), (scale, 2)])
def test_a_counter_that_nothing_depends_on_is_advanced(count: Callable[[Any], Any], total: int) -> None:
    assert given(count) == ([], total)


def test_a_decision_on_a_counter_is_warned_of_at_its_line() -> None:
    (text,), total = given(decide)
    assert f"test_counters.py:{decide.__code__.co_firstlineno + 2} in decide" in text
    assert "n + 1) > 1000" in text
    assert total == 2


@pytest.mark.parametrize("count", [wrap, saturate])
def test_a_number_that_does_not_grow_for_ever_is_no_counter(count: Callable[[Any], Any]) -> None:
    with pytest.raises(pc.TraceError, match="PC114"):
        pc.trace(Net(count), torch.randn(2, 3))
