"""What a call leaves may be made of what the call before left: it is state, and its submodule is kept whole."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import pipecompile as pc


class Leaving(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer, self.kind = nn.Linear(4, 4), kind
        self.seen: list[torch.Tensor] = []
        self.old, self.new = torch.zeros(6, 4), torch.zeros(6, 4)

    def forward(self, x):
        y = self.layer(x)
        last = y.detach()
        if self.kind == "list":
            self.seen = [*self.seen[-1:], last]
        elif self.kind == "shift":
            self.old, self.new = self.new, last
        else:
            self.new, self.seen = last, [last]
        return y


@pytest.mark.parametrize("kind", ["list", "shift", "own"])
def test_values_of_the_call_before_are_kept_as_eager_keeps_them(kind: str) -> None:
    model = nn.Sequential(nn.Linear(4, 9), nn.Linear(9, 4), Leaving(kind), nn.Linear(4, 4))
    x = torch.randn(6, 4)
    kept = pc.explain(model, x).kept_whole
    assert bool(kept) == (kind == "list")
    pipe, part = pc.compile(model, 2, n_microbatches=1, loss_fn=lambda y: y.square().mean(), cost="analytic"), model[2]
    expected = []
    for value in (x, 2 * x, 3 * x):
        pipe.step(value)
        expected.append(part.layer(model[1](model[0](value))).detach())
    torch.testing.assert_close(part.seen, {"list": expected[-2:], "shift": [], "own": expected[-1:]}[kind])
    torch.testing.assert_close(part.new, torch.zeros(6, 4) if kind == "list" else expected[-1])
    torch.testing.assert_close(part.old, expected[-2] if kind == "shift" else torch.zeros(6, 4))
