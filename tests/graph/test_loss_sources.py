"""The numbers of an output that a loss only scales and adds are found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import pipecompile as pc
from pipecompile.batching.merging import MergeKind, MergeRule
from pipecompile.graph.batch_flow import BatchFlow
from pipecompile.graph.loss_sources import LossSources, loss_sources

Loss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class Model(nn.Module):
    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.loss, self.weight = loss, nn.Parameter(torch.ones(3))

    def forward(self, y: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return self.loss(y, a, b) if self.loss is not penalised else a + self.weight.square().sum()


def penalised(_: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a + b


def sources_of(loss: Loss) -> LossSources | None:
    graph = pc.trace(Model(loss), torch.randn(4, 3), torch.tensor(1.0), torch.tensor(2.0))
    (end,) = graph.graph.output_node().args[0]  # type: ignore[misc]
    of_samples = MergeRule(MergeKind.COMPUTED)
    return loss_sources(BatchFlow(graph, {1: of_samples, 2: of_samples}), end)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("loss", "names", "has_constant"),
    [
        (lambda y, a, b: 2 * a, "a", False),
        (lambda y, a, b: a.mean().float() / 3 + 0.1 * b, "ab", False),
        (lambda y, a, b: a - b + 1.0, "ab", True),
        (lambda y, a, b: sum([a, b]), "ab", True),
        (penalised, "a", True),
    ],
)
def test_numbers_that_are_scaled_and_added(loss: Loss, names: str, has_constant: bool) -> None:
    found = sources_of(loss)
    assert found is not None
    assert "".join(str(node.target) for node in found.nodes) == names
    assert found.has_constant is has_constant


@pytest.mark.parametrize("loss", [lambda y, a, b: a + y.mean(), lambda y, a, b: a * a, lambda y, *_: y.square().mean()])
def test_a_loss_with_another_term_has_no_sources(loss: Any) -> None:
    assert sources_of(loss) is None
