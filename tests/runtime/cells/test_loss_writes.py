"""Losses that write their own tensors: each backward finds what the loss of its own micro-batch has left."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import pipecompile as pc
from pipecompile.runtime.cells.loss_writes import LossWrites
from tests.support.eager import accumulate, assert_same


class Prototypes(nn.Module):
    """A loss with a weight that it changes through `.data`, in place or not, or with a new version."""

    def __init__(self, change: Callable[[nn.Parameter], Any]) -> None:
        super().__init__()
        self.change, self.weight = change, nn.Parameter(torch.eye(4).double() + 0.1)

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        self.change(self.weight)
        return functional.mse_loss(output @ self.weight, target)


def _with_version(weight: nn.Parameter) -> None:
    with torch.no_grad():
        weight.mul_(0.9)


def _through_data(weight: nn.Parameter) -> None:
    weight.data.mul_(0.9)


def _with_other_memory(weight: nn.Parameter) -> None:
    weight.data = weight.data * 0.9


def _network() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)).double()


@pytest.mark.parametrize("checkpoint", ["never", "except_last"])
@pytest.mark.parametrize("change", [_with_version, _through_data, _with_other_memory])
def test_a_backward_finds_what_its_own_loss_has_left(change: Callable[[nn.Parameter], Any], checkpoint: str) -> None:
    torch.manual_seed(0)
    model, loss_fn, x, target = (
        _network(),
        Prototypes(change),
        torch.randn(8, 8).double(),
        torch.randn(8, 4).double(),
    )
    reference, own_loss = copy.deepcopy(model), copy.deepcopy(loss_fn)
    pipe = pc.compile(
        model, 2, example_args=(x,), n_microbatches=4, loss_fn=loss_fn, cost="analytic", devices=["cpu"] * 2,
        schedule="gpipe", checkpoint=checkpoint,
    )  # fmt: skip
    for _ in range(2):
        expected = accumulate(reference, x, 4, loss_fn=own_loss, target=target).item()
        assert pipe.step(x, target=target) == pytest.approx(expected, rel=1e-12)
        assert_same(model, reference, 1e-12)
        assert_same(loss_fn, own_loss, 1e-12)
        assert torch.equal(loss_fn.weight, own_loss.weight)


def test_the_first_call_finds_what_is_written() -> None:
    loss_fn = Prototypes(_through_data)
    loss_fn.other = nn.Parameter(torch.ones(2))
    writes = LossWrites(loss_fn)
    assert {*map(id, writes.tensors)} == {id(loss_fn.weight), id(loss_fn.other)}
    writes.watched(loss_fn)(torch.ones(1, 4).double(), torch.ones(1, 4).double())
    assert [*map(id, writes.tensors)] == [id(loss_fn.weight)]
