"""The first node of a recording whose value no call of the model computes."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import pipecompile as pc
from pipecompile.batching.call_inputs import flatten
from pipecompile.verifiers.eager_run import CheckedCall, random_states_of, undone
from pipecompile.verifiers.first_difference import first_difference


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.shift = nn.Linear(4, 4), 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x).relu() + self.shift


def place(model: nn.Module, graph: Any) -> str:
    x = torch.linspace(-1, 1, 12).reshape(3, 4)
    call = CheckedCall(model, flatten(model.forward, (x,), {}), torch.device("cpu"), True, lambda _: None)
    with undone(call):
        return first_difference(graph, call, random_states_of(call))


def test_it_has_the_module_the_line_and_the_operation() -> None:
    model = nn.Sequential(Layer(), Layer(), Layer())
    graph = pc.trace(model, torch.ones(3, 4))
    assert place(model, graph) == ""
    model[1].shift = 2.0
    found = place(model, graph)
    assert found.startswith("add (1: ")
    assert "test_first_difference.py" in found
    assert "Layer.forward" in found


def test_a_layer_that_differs_is_named_itself() -> None:
    model = nn.Sequential(Layer(), Layer())
    graph = pc.trace(model, torch.ones(3, 4))
    model[1].inner = nn.Linear(4, 4)
    assert place(model, graph).startswith("1.inner")
