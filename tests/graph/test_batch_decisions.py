"""Python that decides by values of samples, and leaves a number, is told of in `pipe(x)`."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import pipecompile as pc
from pipecompile.graph.batch_decisions import deciding_lines


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x)
        scale = 1.0
        if x.sum() > 18.0:
            scale = 0.5
        return self.b(h) * scale


class Printing(Scaled):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x)
        print(h.mean().item())
        return self.b(h)


def test_a_number_that_the_whole_batch_decides_otherwise_is_told() -> None:
    model, x = Scaled().eval(), torch.ones(8, 4)
    pipe = pc.compile(model, 2, n_microbatches=4, cost="analytic", devices=["cpu"] * 2)
    with (
        torch.no_grad(),
        pytest.warns(
            pc.RecordingWarning,
            match=r"Python decides at test_batch_decisions.py:\d+ in Scaled.* on several ranks that has",
        ),
    ):
        out = pipe(x)
    assert torch.equal(out, torch.cat([model(part) for part in x.chunk(4)]))
    assert not torch.equal(out, model(x))


def test_a_print_decides_nothing() -> None:
    assert not list(deciding_lines(pc.trace(Printing(), torch.ones(4, 4))))


def test_a_single_micro_batch_is_the_whole_batch() -> None:
    model = Scaled().eval()
    pipe = pc.compile(model, 2, n_microbatches=1, cost="analytic", devices=["cpu"] * 2)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(pipe(x := torch.ones(8, 4)), model(x))
