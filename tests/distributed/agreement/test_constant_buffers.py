"""The buffers that copies compare, by recordings in one process."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import pipecompile as pc
from pipecompile.distributed.agreement.constant_buffers import ConstantBuffers


class Mixed(nn.Module):
    """A layer with a scale that is read, a sum that is written, a buffer that is replaced, and one that nothing uses."""

    scale: torch.Tensor
    seen: torch.Tensor
    last: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        for name in ("scale", "seen", "last", "unused"):
            self.register_buffer(name, torch.ones(4))

    def forward(self, x: torch.Tensor) -> Any:
        y = self.norm(self.linear(x) * self.scale + self.last)
        self.seen.add_(y.detach().sum(0))
        self.last = y.detach().mean(0)
        return y


def names_of(model: nn.Module, tensors: Any) -> list[str]:
    return [name for name, buffer in model.named_buffers() if any(buffer is one for one in tensors)]


def test_what_is_read_and_never_written_is_constant() -> None:
    model = Mixed()
    pipe = pc.compile(model, 1, example_args=(torch.randn(8, 4),), loss_fn=nn.functional.mse_loss, batch_norm="each")
    constants = ConstantBuffers(model, lambda: pipe._cache.entries, lambda _: True)
    assert names_of(model, constants()) == ["scale"]
    assert constants() is constants(), "nothing is looked at again"
    with torch.no_grad():
        pipe.eval()(torch.randn(8, 4))
    assert len(pipe._cache.entries) == 2
    assert names_of(model, constants()) == ["scale"], "training writes the statistics"


def test_statistics_of_a_frozen_layer_are_constant_until_it_is_trained() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    pipe = pc.compile(
        model.eval(), 1, example_args=(torch.randn(8, 4),), loss_fn=nn.functional.mse_loss, batch_norm="each"
    )
    constants = ConstantBuffers(model, lambda: pipe._cache.entries, lambda _: True)
    assert "1.running_mean" in names_of(model, constants())
    pipe.train().step(torch.randn(8, 4), target=torch.randn(8, 4))
    assert not constants()


def test_a_rank_has_its_own_alone() -> None:
    model = Mixed()
    pipe = pc.compile(model, 1, example_args=(torch.randn(8, 4),), loss_fn=nn.functional.mse_loss, batch_norm="each")
    assert not ConstantBuffers(model, lambda: pipe._cache.entries, lambda _: False)()
