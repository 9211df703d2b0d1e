"""A piece kept whole that reads the gradient of a parameter is refused at its line; one that reads gradients of its own tensors is not."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import pipecompile as pc
from pipecompile.errors import TraceError
from pipecompile.tracing.opaque.gradient_reads import GradientReads


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        y = self.layer(x if x.sum().item() < 1e9 else -x)
        seen = self.layer.weight.grad
        return y if seen is None else y / seen.norm()


class Inner(Scaled):
    def forward(self, x):
        shift = torch.zeros(4, requires_grad=True)
        if x.sum().item() < 1e9:
            (x.detach() + shift).square().sum().backward()
        return self.layer(x) + shift.grad


def around(part: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 9), nn.Linear(9, 4), part, nn.Linear(4, 4))


def test_a_piece_that_reads_the_gradient_of_a_parameter_is_refused_at_its_line() -> None:
    with pytest.raises(TraceError, match="PC113") as caught:
        pc.trace(around(Scaled()), torch.randn(6, 4))
    assert "self.layer.weight.grad" in str(caught.value)


def test_a_piece_may_read_gradients_of_tensors_that_it_makes() -> None:
    assert pc.explain(around(Inner()), torch.randn(6, 4)).kept_whole


def test_reads_of_frozen_parameters_and_other_tensors_do_not_count() -> None:
    model = nn.Linear(2, 2)
    model.bias.requires_grad_(False)
    with GradientReads(model) as reads:
        _ = model.bias.grad, torch.ones(2, requires_grad=True).grad
    reads.check()
    with reads:
        _ = model.weight.grad
    with pytest.raises(TraceError, match="PC113"):
        reads.check()
