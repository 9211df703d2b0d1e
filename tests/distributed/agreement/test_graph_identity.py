"""What ranks compare of the graphs that they recorded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from pipecompile.distributed.agreement.graph_identity import graph_identity, graph_parts
from pipecompile.tracing import trace


class Model(nn.Module):
    def __init__(self, middle: nn.Module, width: int = 8, factor: float = 2.0, mode: str = "floor") -> None:
        super().__init__()
        self.a, self.middle, self.b = nn.Linear(4, width), middle, nn.Linear(width, 2)
        self.factor, self.mode = factor, mode

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.div(self.b(self.middle(self.a(x))) * self.factor, 3, rounding_mode=self.mode)


def identity(with_numbers: bool = True, device: str = "cpu", **options: Any) -> str:
    given = {"middle": nn.Dropout(0.1)} | options
    return graph_identity(trace(Model(**given).to(device), torch.randn(4, 4)), with_numbers=with_numbers)


@pytest.mark.parametrize(
    "options",
    [{"middle": nn.Tanh()}, {"middle": nn.Dropout(0.2)}, {"width": 16}, {"factor": 3.0}, {"mode": "trunc"}],
    ids=lambda options: next(iter(options)),
)
def test_another_model_has_another_identity(options: dict[str, Any]) -> None:
    assert identity() == identity()
    assert identity(**options) != identity()


def test_numbers_are_left_out_where_parts_of_the_batch_differ() -> None:
    assert identity(with_numbers=False, factor=3.0) == identity(with_numbers=False)
    assert identity(with_numbers=False, mode="trunc") != identity(with_numbers=False)


def test_the_parts_of_a_graph_are_its_modules_with_what_they_do() -> None:
    parts = graph_parts(trace(Model(nn.Dropout(0.1)), torch.randn(4, 4)), with_numbers=True)
    assert parts["middle"] == "Dropout(p=0.1, inplace=False)"
    assert parts["a"] == "Linear(in_features=4, out_features=8, bias=True)"
    assert "2.0" in parts[""]
    assert "floor" in parts[""]
    assert parts["b.weight"] == "(2, 8) torch.float32"
    without = graph_parts(trace(Model(nn.Dropout(0.1)), torch.randn(4, 4)), with_numbers=False)
    assert "2.0" not in without[""]
