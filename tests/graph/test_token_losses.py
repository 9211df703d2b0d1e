"""Losses that add up over positions."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pipecompile as pc
from pipecompile.errors import PlanError
from pipecompile.graph.token_losses import TokenLoss
from tests.support.decoders import token_loss

Loss = Callable[[Tensor, Tensor], Tensor]


class Call(nn.Module):
    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.loss = loss

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return self.loss(output, target)


def loss_of(loss: Loss) -> TokenLoss:
    graphs = [
        pc.trace(Call(loss), torch.randn(3, length, 7, requires_grad=True), torch.zeros(3, length, dtype=torch.long))
        for length in (4, 16)
    ]
    return TokenLoss(*graphs, 4, 4, "the loss")


RUN: dict[str, tuple[Loss, str]] = {
    "flat": (token_loss, "mean"),
    "moved": (lambda y, t: nn.CrossEntropyLoss()(y.transpose(1, 2), t), "mean"),
    "scaled": (lambda y, t: 2 * token_loss(y, t) / 3, "mean"),
    "summed": (lambda y, t: F.cross_entropy(y.flatten(0, 1), t.flatten(), reduction="sum"), "sum"),
    "each": (lambda y, t: F.cross_entropy(y.transpose(1, 2), t, reduction="none").mean(), "mean"),
    "log": (lambda y, t: F.nll_loss(y.log_softmax(-1).flatten(0, 1), t.flatten()), "mean"),
    "squares": (lambda y, t: F.mse_loss(y[..., 0], t.float()), "mean"),
    "no target": (lambda y, _: y.square().sum(), "sum"),
}

REFUSED: dict[str, Loss] = {
    "last": lambda y, t: F.cross_entropy(y[:, -1], t[:, -1]),
    "shifted": lambda y, t: token_loss(y[:, :-1], t[:, 1:]),
    "pooled": lambda y, t: F.cross_entropy(y.mean(1), t[:, 0]),
    "per sample": lambda y, t: F.cross_entropy(y.transpose(1, 2), t, reduction="none").mean(1).square().mean(),
    "perplexity": lambda y, t: token_loss(y, t).exp(),
    "shifted up": lambda y, t: token_loss(y, t) + 1,
    "two terms": lambda y, t: token_loss(y, t) + y.square().mean(),
    "over length": lambda y, t: F.cross_entropy(y.flatten(0, 1), t.flatten(), reduction="sum") / t.shape[1],
    "other places": lambda y, t: F.cross_entropy(y.transpose(0, 1).flatten(0, 1), t.flatten()),
    "inverse": lambda y, t: 1 / token_loss(y, t),
}


@pytest.mark.parametrize("name", RUN)
def test_means_and_sums_over_positions(name: str) -> None:
    loss, reduction = RUN[name]
    assert loss_of(loss).reduction == reduction


@pytest.mark.parametrize("name", REFUSED)
def test_others_are_refused(name: str) -> None:
    with pytest.raises(PlanError, match="the loss cannot run on slices of a sequence"):
        loss_of(REFUSED[name])
