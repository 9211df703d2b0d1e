"""Buffers that a graph writes in place."""

from __future__ import annotations

import torch
from torch import nn

import pipecompile as pc
from pipecompile.tracing.emit.written_back import is_written_back


def test_shape_and_dtype_decide() -> None:
    assert is_written_back(torch.ones(2, 3), torch.zeros(2, 3))
    assert not is_written_back(torch.ones(2, 3), torch.zeros(3))
    assert not is_written_back(torch.ones(2, 3), torch.zeros(2, 4))
    assert not is_written_back(torch.ones(2), torch.zeros(2).double())
    assert not is_written_back(None, torch.zeros(2))
    assert is_written_back(None, None)


def test_a_size_that_is_that_of_the_batch_by_chance_is_not_the_same() -> None:
    class Shows(nn.Linear):
        def __init__(self) -> None:
            super().__init__(3, 2)
            self.register_buffer("shown", torch.zeros(4, 2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = super().forward(x)
            self.shown = y.detach()
            return y

    graph = pc.trace(Shows(), torch.randn(4, 3))
    assert graph.facts.batch_size is None
    assert graph.facts.rebound == ()
