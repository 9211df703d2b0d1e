"""Losses that divide by what counts: loss and gradients of a step are eager's on the mini-batch, for any split."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import pipecompile as pc

LABELS = torch.tensor(
    [[1, 2, 0], [-100, 2, -100], [-100, -100, 4], [0, -100, -100], [-100, -100, -100], [-100] * 3, [3, 3, 1]]
)


def tokens(y: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(y.flatten(0, 1), labels.flatten())


def masked(y: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    counted = (labels != -100).float()
    each = y.mean(-1).sub(labels.clamp(min=0)).square()
    return (each * counted).sum() / counted.sum().clamp(min=1)


class Tagger(nn.Module):
    """A class for each of 3 tokens; with `loss`, the model computes its loss."""

    def __init__(self, loss: Callable[..., torch.Tensor] | None = None) -> None:
        super().__init__()
        self.a, self.b, self.loss = nn.Linear(4, 8), nn.Linear(8, 5), loss

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        y = self.b(self.a(x).tanh())
        return y if self.loss is None else {"loss": self.loss(y, labels), "logits": y}


WEIGHTED = nn.CrossEntropyLoss(torch.arange(1.0, 6.0))

LOSSES: dict[str, Callable[..., torch.Tensor]] = {
    "ignored tokens": tokens,
    "classes in dimension 1": lambda y, labels: F.cross_entropy(y.mT, labels),
    "class weights": lambda y, labels: F.cross_entropy(y.mT, labels, torch.arange(1.0, 6.0)),
    "a module with weights": lambda y, labels: WEIGHTED(y.mT, labels),
    "shifted labels": lambda y, labels: tokens(y[:, :-1], labels[:, 1:]),
    "a mask": masked,
}


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("name", LOSSES)
def test_a_mean_over_what_counts_is_that_of_the_mini_batch(name: str, own: bool) -> None:
    torch.manual_seed(0)
    loss_fn = LOSSES[name]
    model = Tagger(loss_fn if own else None)
    eager, x = copy.deepcopy(model), torch.randn(7, 3, 4)
    pipe = pc.compile(
        model, 2, cost="analytic", devices=["cpu"] * 2, n_microbatches=4, loss_fn=None if own else loss_fn
    )
    for labels in (LABELS, LABELS.flip(0), LABELS.clamp(min=0)):
        model.zero_grad()
        eager.zero_grad()
        loss = pipe.step(x, labels=labels) if own else pipe.step(x, target=labels)
        expected = eager(x, labels)["loss"] if own else loss_fn(eager(x), labels)
        expected.backward()
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-5, atol=1e-6)
        for mine, theirs in zip(model.parameters(), eager.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=1e-6)


def test_plain_classes_keep_the_shares_of_the_samples() -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh())
    pipe = pc.compile(model, 1, cost="analytic", devices=["cpu"], n_microbatches=3, loss_fn=F.cross_entropy)
    eager, x, target = copy.deepcopy(model), torch.randn(7, 4), torch.randint(5, (7,))
    loss = pipe.step(x, target=target)
    expected = sum(
        F.cross_entropy(eager(a), b) * (len(a) / 7)
        for a, b in zip(x.tensor_split(3), target.tensor_split(3), strict=True)
    )
    assert torch.equal(loss, expected.detach())  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("loss_fn", "words"),
    [
        (lambda y, labels: F.cross_entropy(y.mT, labels, reduction="sum"), "is a sum"),
        (lambda y, labels: (y.mean((1, 2)) * labels[:, 0]).softmax(0).square().sum(), "neither a mean nor a sum"),
    ],
)
def test_a_loss_that_micro_batches_change_is_told_in_the_first_step(
    loss_fn: Callable[..., torch.Tensor], words: str
) -> None:
    pipe = pc.compile(Tagger(), 1, cost="analytic", devices=["cpu"], n_microbatches=2, loss_fn=loss_fn)
    with pytest.warns(pc.RecordingWarning, match=words):
        pipe.step(torch.randn(7, 3, 4), target=LABELS)
