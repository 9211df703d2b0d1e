"""Micro-batches of a list are weighted by what their losses count: a step equals the loop, with the counts written out."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import pipecompile as pc
from pipecompile.errors import RecordingWarning

Loss = Callable[..., torch.Tensor]
SHAPES = ((3, 5), (2, 9), (1, 5), (2, 4))


class Tagger(nn.Module):
    """Five numbers for each of T tokens; with `loss`, the model computes its loss."""

    def __init__(self, loss: Loss | None = None) -> None:
        super().__init__()
        self.a, self.b, self.loss = nn.Linear(4, 8), nn.Linear(8, 5), loss

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        y = self.b(self.a(x).tanh())
        return y if self.loss is None else {"loss": self.loss(y, labels)}


def microbatches(shapes: tuple[tuple[int, int], ...] = SHAPES) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    listed = []
    for b, t in shapes:
        labels = torch.randint(5, (b, t), generator=generator)
        labels[torch.rand(b, t, generator=generator) < 0.4] = -100
        listed.append((torch.randn(b, t, 4, generator=generator), labels))
    listed[2][1][:] = -100  # nothing counts in this one
    return listed


def counted(labels: torch.Tensor) -> torch.Tensor:
    return (labels != -100).float()


def masked(y: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    mask = counted(labels)
    return (y.square().mean(-1) * mask).sum() / mask.sum().clamp(min=1)


def of_means(y: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return (y.square().mean(-1) * counted(labels)).mean() / (counted(labels).mean() + 1e-8)


def tokens(y: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(y.flatten(0, 1), labels.flatten())


CLASSES = torch.arange(1.0, 6.0, dtype=torch.float64)
LOSSES: dict[str, tuple[Loss, Callable[[torch.Tensor], float]]] = {
    "labels": (tokens, lambda one: float(counted(one).sum())),
    "weights of classes": (
        lambda y, labels: F.cross_entropy(y.mT, labels, CLASSES),
        lambda one: float((CLASSES[one.clamp(min=0)] * counted(one)).sum()),
    ),
    "a mask with a floor": (masked, lambda one: float(counted(one).sum())),
    "a ratio of means": (of_means, lambda one: float(counted(one).sum())),
    "all elements": (lambda y, _: y.square().mean(), lambda one: float(one.numel())),
    "a loss of elements": (lambda y, _: F.mse_loss(y, torch.ones_like(y)), lambda one: float(one.numel())),
    "a mean of sums": (lambda y, _: y.square().sum((1, 2)).mean(), lambda one: float(len(one))),
    "a mean of means": (lambda y, _: y.square().mean((1, 2)).mean(), lambda one: float(len(one))),
    "a sum over its size": (lambda y, _: y.square().sum() / y.numel(), lambda one: float(one.numel())),
    "a layer": (lambda y, _: nn.SmoothL1Loss()(y, torch.zeros_like(y)), lambda one: float(one.numel())),
    "two terms and a constant": (
        lambda y, labels: tokens(y, labels) + 0.3 * tokens(-y, labels) + 1.0,
        lambda one: float(counted(one).sum()),
    ),
}  # fmt: skip


def looped(model: nn.Module, listed: list[Any], loss: Loss, count: Callable[[torch.Tensor], float]) -> float:
    total, result = sum(count(labels) for _, labels in listed), 0.0
    for x, labels in listed:
        if share := count(labels) / total:
            part = loss(model(x), labels) * share
            part.backward()
            result += float(part.detach())
    return result


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("name", "is_own"), [*((name, False) for name in LOSSES), ("a mask with a floor", True), ("a mean of means", True)]
)
def test_weights_are_shares_of_what_the_loss_counts(name: str, is_own: bool) -> None:
    loss, count = LOSSES[name]
    torch.manual_seed(0)
    model = Tagger().double()
    plain, listed = copy.deepcopy(model), [(x.double(), labels) for x, labels in microbatches()]
    if is_own:
        model.loss = loss
    options: dict[str, Any] = {} if is_own else {"loss_fn": loss}
    pipe = pc.compile(model, 2, devices=["cpu"] * 2, n_microbatches=2, cost="analytic", **options)
    named = [{"x": x, "labels" if is_own else "target": labels} for x, labels in listed]
    with warnings.catch_warnings():
        warnings.simplefilter("error", RecordingWarning)
        result = pipe.step(microbatches=named)
    expected = looped(plain, listed, loss, count)
    torch.testing.assert_close(float(result), expected, rtol=1e-6, atol=1e-9)
    for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-6, atol=1e-9)


def test_a_sum_adds_the_micro_batches() -> None:
    model = Tagger()
    plain, listed = copy.deepcopy(model), microbatches()

    def loss(y: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        return y.square().sum()

    options: dict[str, Any] = {"devices": ["cpu"] * 2, "n_microbatches": 2, "cost": "analytic", "loss_fn": loss}
    result = pc.compile(model, 2, loss_reduction="sum", **options).step(microbatches=listed)
    expected = sum(loss(plain(x), labels) for x, labels in listed)
    torch.testing.assert_close(result, expected.detach())
    with pytest.warns(RecordingWarning, match="the loss is a sum over the samples"):
        pc.compile(model, 2, **options).step(microbatches=listed)


@pytest.mark.parametrize("loss", [lambda y, _: y.square().mean().sqrt(), lambda y, _: y.square().amax()])
def test_a_loss_whose_count_is_unknown_is_warned_of(loss: Loss) -> None:
    pipe = pc.compile(Tagger(), 2, devices=["cpu"] * 2, n_microbatches=2, cost="analytic", loss_fn=loss)
    with pytest.warns(RecordingWarning, match="what the loss divides by cannot be found"):
        pipe.step(microbatches=microbatches()[:2])
