"""The count of a loss, found in its graph: numbers for sizes, labels and masks for values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import pipecompile as pc
from pipecompile.graph.loss_counts import loss_count
from pipecompile.ir import TARGET

SAMPLES, LENGTH = 4, 3
LABELS = torch.tensor([[0, 1, -100], [2, -100, -100], [1, 1, 1], [-100, -100, -100]])


class Loss(nn.Module):
    def __init__(self, function: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.function, self.layer = function, nn.Linear(5, 5)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.function(self.layer(x), labels)


def count_of(function: Callable[..., torch.Tensor]) -> float | None:
    graph = pc.trace(Loss(function), torch.randn(SAMPLES, LENGTH, 5), LABELS)
    (loss,) = graph.graph.output_node().args[0]
    found = loss_count(graph, loss)
    values: dict[str, Any] = {"labels": LABELS, TARGET: LABELS}
    return None if found is None else float(found.of(values, SAMPLES))


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda y, _: y.mean(), 60.0),
        (lambda y, _: 2 * y.mean() + 1, 60.0),
        (lambda y, _: y.mean(0).mean(), 60.0),
        (lambda y, _: y.mean((1, 2)).mean(0), 4.0),
        (lambda y, _: y.sum() / y.shape[0], 4.0),
        (lambda y, _: F.l1_loss(y, y * 2), 60.0),
        (lambda y, _: F.kl_div(y, y.exp(), reduction="batchmean"), 4.0),
        (lambda y, _: nn.MSELoss()(y, torch.zeros_like(y)), 60.0),
        (lambda y, _: F.cosine_similarity(y, y * 2, -1).mean(), 12.0),
        (lambda y, labels: F.cross_entropy(y.mT, labels), 6.0),
        (lambda y, labels: F.cross_entropy(y.mT, labels) - F.cross_entropy(-y.mT, labels), 6.0),
        (lambda y, labels: (y.mean(-1) * (labels > 0)).sum() / (labels > 0).sum().clamp(min=1), 5.0),
    ],
)
def test_the_count_of_a_mean(function: Callable[..., torch.Tensor], expected: float) -> None:
    assert count_of(function) == expected


@pytest.mark.parametrize(
    "function",
    [
        lambda y, _: y.sum(),
        lambda y, _: y.amax(),
        lambda y, _: y.square().mean().sqrt(),
        lambda y, labels: F.cross_entropy(y.mT, labels) + y.mean(),
        lambda y, labels: y.sum() / (labels > 0).sum().square(),
        lambda y, _: y.sum() / y.square().sum(),
    ],
)
def test_a_loss_without_a_known_count(function: Callable[..., torch.Tensor]) -> None:
    assert count_of(function) is None


def test_the_count_of_several_losses_is_the_one_that_they_share() -> None:
    graph = pc.trace(nn.MSELoss(), torch.randn(4, 5), torch.randn(4, 5))
    (loss,) = graph.graph.output_node().args[0]  # type: ignore[misc]
    found = loss_count(graph, loss, loss)  # type: ignore[arg-type]
    assert found is not None
    assert float(found.of({}, SAMPLES)) == 5 * SAMPLES
