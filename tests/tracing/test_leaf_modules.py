"""Layers of torch are one node each, containers are recorded through."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pipecompile.tracing import trace
from pipecompile.tracing.leaf_modules import is_leaf


class Own(nn.Module):
    pass


@pytest.mark.parametrize(
    "module", [nn.Conv2d(3, 3, 1), nn.LSTM(2, 2), nn.GRUCell(2, 2), nn.MultiheadAttention(2, 1), nn.ReLU()]
)
def test_layers_of_torch_stay_whole(module):
    assert is_leaf(module)


@pytest.mark.parametrize(
    "module", [nn.Sequential(nn.ReLU()), nn.TransformerEncoderLayer(2, 1), nn.ModuleList([nn.ReLU()]), Own()]
)
def test_containers_and_modules_of_users_do_not(module):
    assert not is_leaf(module)


class Hooked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.ReLU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.inner(self.a(x)))


def rows(size: int) -> tuple[torch.Tensor]:
    return (torch.randn(size, 4, generator=torch.Generator().manual_seed(size)),)


def test_forward_hooks_on_leaves_and_containers(agrees):
    model = Hooked()
    model.inner.register_forward_hook(lambda module, args, output: output * 2)
    model.a.register_forward_hook(lambda module, args, output: output + 1)
    model.b.register_forward_pre_hook(lambda module, args: (args[0] * 3,))
    graph = agrees(model, rows)
    assert "inner.0" in {node.target for node in graph.graph.nodes}


def test_modules_with_backward_hooks_stay_whole(agrees):
    model = Hooked()
    model.inner.register_full_backward_hook(lambda module, given, made: (given[0] * 2,))
    model.a.register_full_backward_pre_hook(lambda module, made: (made[0] * 3,))
    graph = agrees(model, rows)
    assert [node.target for node in graph.graph.nodes if node.op == "call_module"] == ["a", "inner", "b"]


@pytest.mark.parametrize("batch_first", [True, False])
def test_recurrent_layers_know_their_shapes_without_being_unrolled(batch_first):
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.LSTM(4, 3, 2, batch_first=batch_first, bidirectional=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x if batch_first else x.transpose(0, 1)
            y, (h, _) = self.rnn(x)
            assert y.shape == (*x.shape[:2], 6)
            assert y.is_contiguous() != batch_first
            assert h.shape[0] == 4
            return y + h.sum(0).repeat(1, 2)[:, None] if batch_first else y

    model, x = Recurrent(), torch.randn(3, 500, 4)
    graph = trace(model, x)
    assert len(graph.graph.nodes) < 15
    assert torch.equal(graph(x[:2]), model(x[:2]))


def test_hooks_see_what_they_would_see(agrees):
    model = Hooked()
    model.rnn = nn.GRU(4, 4)
    model.rnn.register_forward_hook(lambda module, args, output: output[0] * args[0].shape[0])
    agrees(nn.Sequential(model, model.rnn), rows)
