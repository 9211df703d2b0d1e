"""Substitutes for modules in experiments: copies of layers, and pieces kept whole, whose state stays."""

from __future__ import annotations

import torch
from torch import nn

import pipecompile as pc
from pipecompile.graph.probe_layers import KeptPiece, probe_layer, randomise

MOST = 100


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))
        self.weight, self.calls = nn.Parameter(torch.ones(3)), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.seen += len(x)
        return x * self.weight if x.sum() > -1e6 else x


def test_layers_are_copied_unless_they_are_large() -> None:
    layer = nn.Linear(3, 3)
    twin = probe_layer(layer, MOST)
    assert isinstance(twin, nn.Linear)
    assert twin is not layer
    randomise(twin)
    assert not torch.equal(twin.weight, layer.weight)
    assert probe_layer(nn.Linear(20, 20), MOST) is None


def test_a_piece_runs_as_it_is_and_leaves_nothing() -> None:
    model = nn.Sequential(nn.Linear(3, 3), Counting())
    part = model[1]
    graph = pc.trace(model, torch.randn(4, 3))
    calls = part.calls
    twin = probe_layer(graph.get_submodule("1"), MOST)
    assert isinstance(twin, KeptPiece)
    assert not list(twin.parameters())
    assert torch.equal(twin(0, 2, torch.ones(2, 3)), torch.ones(2, 3))
    assert (part.calls, float(part.seen)) == (calls, 0)
