"""Dropout that is switched on after the recording: draws come in eager's order, whatever stages its layers are in."""

from __future__ import annotations

import copy
from itertools import pairwise

import pytest
import torch
from torch import nn

import pipecompile as pc

X = torch.randn(4, 5, 8)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(8, 2, dropout=0.0, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        attended, _ = self.inner(x, x, x)
        assert isinstance(attended, torch.Tensor)
        return attended


class Block(nn.Module):
    """Two branches beside each other. The short one can be in an earlier stage than the long one, which eager runs first."""

    def __init__(self, last: nn.Module) -> None:
        super().__init__()
        self.long = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), last)
        self.short = nn.Linear(8, 8)
        self.drops = nn.ModuleList([nn.Dropout(0.0), nn.Dropout(0.0)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        long = self.drops[0](self.long(x))
        short = self.drops[1](self.short(x))
        return x + long + short  # type: ignore[no-any-return]


def in_turn(n_stages: int, n_microbatches: int, _n_devices: int) -> pc.Schedule:
    """One micro-batch after the other, which draw as a plain loop does."""
    rows = [",".join(f"{s}F{m},{s}B{m}" for m in range(n_microbatches)) for s in range(n_stages)]
    return pc.Schedule.from_csv("\n".join(rows) + "\n")


def square(y: torch.Tensor) -> torch.Tensor:
    return y.square().mean()


def switch(model: nn.Module, probability: float) -> None:
    for layer in model.modules():
        if isinstance(layer, nn.Dropout):
            layer.p = probability
        elif isinstance(layer, nn.MultiheadAttention):
            layer.dropout = probability


@pytest.mark.sampled(3)
@pytest.mark.parametrize("last", [lambda: nn.Linear(8, 8), Attention])
@pytest.mark.parametrize("n_stages", [2, 4])
@pytest.mark.parametrize("probabilities", [(0.0, 0.5, 0.3, 0.0), (1.0, 0.5, 1.0)])
def test_dropout_that_is_switched_on_draws_in_the_order_of_eager(
    last: type[nn.Module], n_stages: int, probabilities: tuple[float, ...]
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(last()) for _ in range(3)), nn.Linear(8, 1))
    twin = copy.deepcopy(model)
    switch(model, probabilities[0]), switch(twin, probabilities[0])
    pipe = pc.compile(model, n_stages, example_args=(X,), n_microbatches=2, loss_fn=square, schedule=in_turn, cost="analytic",
                      devices=["cpu"] * n_stages, dispatch="inline")  # fmt: skip
    for probability in probabilities:
        switch(model, probability), switch(twin, probability)
        model.zero_grad(), twin.zero_grad()
        torch.manual_seed(1)
        loss = pipe.step(X)
        torch.manual_seed(1)
        for part in X.chunk(2):
            (square(twin(part)) / 2).backward()
        for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
            assert torch.equal(ours.grad, theirs.grad)  # type: ignore[arg-type]
        assert loss.isfinite()
    zeros = [p in (0.0, 1.0) for p in probabilities]
    assert pipe.explain().traces <= 1 + sum(one or other for one, other in pairwise(zeros))
