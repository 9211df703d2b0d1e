"""What a call has changed is as before, if it is undone."""

from __future__ import annotations

import random
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from pipecompile.distributed.data_parallel.call_undo import CallUndo
from pipecompile.errors import RunError


class Counting(nn.Module):
    """A layer with running statistics, dropout, an attribute, a list and a frozen parameter that its forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm, self.dropout = nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout(0.5)
        self.book = nn.Parameter(torch.zeros(3), requires_grad=False)
        self.calls, self.seen, self.generator = 0, list[int](), torch.Generator()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.seen.append(self.calls)
        self.book += random.random() + torch.rand((), generator=self.generator)
        return self.dropout(self.norm(self.layer(x)))


def cache() -> Any:
    return SimpleNamespace(entries=["a recording"], traces=1, listed=SimpleNamespace(clear=lambda: None))


def undo_of(model: nn.Module, inputs: Any = (), kept: Any = None) -> CallUndo:
    return CallUndo([model], lambda _: True, kept or cache(), inputs)


def test_a_call_is_undone_and_gives_the_same_again() -> None:
    torch.manual_seed(0)
    model, x, kept = Counting(), torch.randn(4, 3, requires_grad=True), cache()
    model(x).square().sum().backward()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    gradients, of_input = [parameter.grad for parameter in model.parameters()], x.grad
    values = [gradient.clone() for gradient in (*filter(lambda g: g is not None, gradients), of_input)]
    undo, results = undo_of(model, {"x": [x]}, kept), []
    for _ in range(2):
        for parameter in model.parameters():
            parameter.grad = None  # as a step begins
        results.append(model(x))
        results[-1].square().sum().backward()
        kept.entries, kept.traces = ["another"], 2
        undo.restore()
        assert [parameter.grad for parameter in model.parameters()] == gradients
        assert x.grad is of_input
        now = [*filter(lambda g: g is not None, gradients), x.grad]
        assert all(torch.equal(a, b) for a, b in zip(now, values, strict=True))
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        assert (model.calls, model.seen, kept.entries, kept.traces) == (1, [1], ["a recording"], 1)
    assert torch.equal(*results)


def test_gradients_of_inputs_in_objects_are_undone() -> None:
    """A call that was made again added to them twice."""

    @dataclass
    class Batch:
        x: torch.Tensor

    x = torch.ones(2, requires_grad=True)
    undo = undo_of(nn.Identity(), Batch(x))
    x.sum().backward()
    undo.restore()
    assert x.grad is None


def test_sums_go_into_the_memory_of_the_earlier_gradients() -> None:
    layer = nn.Linear(2, 2)
    layer(torch.ones(1, 2)).sum().backward()
    held = layer.weight.grad
    assert held is not None
    undo = undo_of(layer)
    layer.weight.grad = held + 1
    layer.bias.grad = None
    undo.settle()
    assert layer.weight.grad is held
    assert held.tolist() == [[2, 2], [2, 2]]


def test_a_forward_that_writes_a_trained_parameter_cannot_be_undone() -> None:
    layer = nn.Linear(2, 2)
    undo = undo_of(layer)
    with torch.no_grad():
        layer.weight.mul_(2)
    with pytest.raises(RunError, match="the call that failed cannot be undone"):
        undo.restore()
