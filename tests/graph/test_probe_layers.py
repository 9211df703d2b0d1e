"""Substitutes for modules in experiments: copies of layers, and pieces kept whole, whose state stays."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
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


CALLS: list[int] = []


def test_hooks_of_a_copied_layer_run_and_leave_nothing() -> None:
    state, layer = SimpleNamespace(calls=0, mean=torch.zeros(3)), nn.Linear(3, 3)

    def hook(_layer: nn.Module, _inputs: object, output: torch.Tensor) -> torch.Tensor:
        state.calls += 1
        state.mean.add_(1)
        CALLS.append(state.calls)
        return output + state.calls

    layer.register_forward_hook(hook)
    twin = probe_layer(layer, MOST)
    assert twin is not None
    assert len(list(twin.parameters())) == 2
    x = torch.ones(2, 3)
    for _ in range(2):
        torch.testing.assert_close(twin(x), nn.functional.linear(x, layer.weight, layer.bias) + 1)
    assert (state.calls, CALLS, state.mean.tolist()) == (0, [], [0.0, 0.0, 0.0])


class Running(nn.Module):
    """Has a law of the batch that is found by experiments alone, with the layers behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean = self.mean * 0.9 + x.detach().mean(0)
        return self.layer(x) + self.mean


def test_a_step_counts_calls_of_hooks_once_a_micro_batch() -> None:
    counts = [0]
    model = nn.Sequential(Running(), nn.Linear(3, 3), nn.Tanh())
    model[1].register_forward_hook(lambda *_: counts.__setitem__(0, counts[0] + 1))
    pipe = pc.compile(model, 2, n_microbatches=4, loss_fn=nn.functional.mse_loss, cost="analytic")
    with pytest.warns(pc.RecordingWarning, match="samples of a batch meet"):
        pipe.step(torch.randn(8, 3), target=torch.randn(8, 3))
    assert counts == [4]
