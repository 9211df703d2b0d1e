"""Counters that a forward advances: a decision on one is warned of, and a number that wraps is not a counter."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from functools import cached_property
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


class Counted(nn.Module):
    """Counts samples, and calls at keys that the first call makes."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.seen, self.halves, self.kinds, self.from_none = 0, 0.0, Counter(), None

    def forward(self, x):
        self.seen += len(x)
        self.halves += 0.5 * x.shape[0]
        self.kinds["samples"] += x.shape[0]
        self.kinds["calls"] += 1
        self.calls = getattr(self, "calls", 0) + 1
        self.from_none = 10 if self.from_none is None else self.from_none + 1
        return self.last(self.first(x).relu())

    def counts(self):
        return self.seen, self.halves, dict(self.kinds), getattr(self, "calls", None), self.from_none


@pytest.mark.parametrize("checkpoint", ["never", "always"])
@pytest.mark.filterwarnings("error::pipecompile.RecordingWarning")
def test_samples_and_first_numbers_are_counted(checkpoint):
    model, eager = Counted(), Counted()
    pipe = pc.compile(
        model, 2, n_microbatches=2, loss_fn=nn.functional.mse_loss, cost="analytic", checkpoint=checkpoint
    )
    for samples in (5, 4, 5):  # micro-batches of 3 and 2 samples
        x = torch.randn(samples, 4)
        pipe.step(x, target=x)
        for part in x.chunk(2):
            eager(part)
        assert model.counts() == eager.counts()
    assert pipe.explain().traces == 1


class Decided(Counted):
    def forward(self, x):
        self.seen += len(x)
        y = self.first(x)
        return self.last(y.relu() if self.seen < 100 else y)


def test_a_decision_on_a_number_of_samples_is_warned_of():
    x = torch.randn(4, 4)
    pipe = pc.compile(Decided(), 2, n_microbatches=1, loss_fn=nn.functional.mse_loss, cost="analytic")
    with pytest.warns(pc.RecordingWarning, match="changes seen in a way that a graph cannot"):
        pipe.step(x, target=x)


class Measured(Counted):
    """Compares a number that is made once, and advances another."""

    def forward(self, x):
        self.calls = getattr(self, "calls", 0) + 1
        if getattr(self, "width", None) != x.shape[1]:
            self.width = x.shape[1]
        return self.last(self.first(x).relu())


@pytest.mark.filterwarnings("error::pipecompile.RecordingWarning")
def test_a_comparison_of_a_number_that_stays_is_no_decision_on_a_counter():
    x = torch.randn(4, 4)
    model = Measured()
    pc.compile(model, 2, n_microbatches=2, loss_fn=nn.functional.mse_loss, cost="analytic").step(x, target=x)
    assert (model.calls, model.width) == (2, 4)


class ComputedOnce(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last, self.rate = nn.Linear(4, 4), nn.Linear(4, 4), 0.5

    @cached_property
    def scale(self):
        return 2 * self.rate

    def forward(self, x):
        return self.last(self.first(x) * self.scale)


@pytest.mark.filterwarnings("error::pipecompile.RecordingWarning")
def test_a_number_that_the_first_call_computes_is_no_counter():
    model, x = ComputedOnce(), torch.randn(4, 4)
    pipe = pc.compile(model, 2, n_microbatches=2, loss_fn=nn.functional.mse_loss, cost="analytic")
    for _ in range(2):
        pipe.step(x, target=x)
    assert model.scale == 1
    assert pipe.explain().traces == 1
