"""Modules of TorchScript in a pipeline: their buffers are those of the plain loop, with recomputation and trial runs."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import pipecompile as pc
from tests.support.eager import accumulate

pytestmark = [
    pytest.mark.smoke,
    pytest.mark.filterwarnings("ignore::pipecompile.RecordingWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.*"),
]


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.norm(self.first(x))))


def scripted(*, alone: bool) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        part = torch.jit.script(Normed())
    return part if alone else nn.Sequential(nn.Linear(6, 6), part, nn.Linear(3, 3))


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Not to be recorded, so that it is measured."""
    return F.cross_entropy(output, target) if output.sum() < 1e9 else output.sum()


@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize("options", [{}, {"checkpoint": "always"}, {"schedule": "zb-h1"}], ids=str)
def test_running_statistics_are_those_of_the_loop(options: dict[str, Any], alone: bool) -> None:
    """Runs that are not the user's left theirs, and a recomputation updated them once more."""
    torch.manual_seed(0)
    model, x, y = scripted(alone=alone), torch.randn(8, 6), torch.randint(3, (8,))
    twin = scripted(alone=alone)
    twin.load_state_dict(model.state_dict())
    pipe = pc.compile(model, 2, devices=["cpu"] * 2, n_microbatches=4, cost="analytic", loss_fn=loss, **options)
    for _ in range(2):
        torch.testing.assert_close(pipe.step(x, target=y), accumulate(twin, x, 4, loss, y))
    for name, value in twin.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value, msg=name)
    for own, expected in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(own.grad, expected.grad)


def test_profiled_costs_leave_no_trace() -> None:
    model, x = scripted(alone=False), torch.randn(8, 6)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    pc.compile(model, 2, devices=["cpu"] * 2, example_args=(x,), n_microbatches=4, cost="profile")
    for name, value in before.items():
        assert torch.equal(model.state_dict()[name], value), name


@pytest.mark.filterwarnings("default::pipecompile.RecordingWarning")
def test_they_are_warned_of_and_cannot_be_deferred() -> None:
    """They were updated once a micro-batch, without a word."""
    x, y, options = (
        torch.randn(8, 6),
        torch.randint(3, (8,)),
        {"n_microbatches": 4, "cost": "analytic", "loss_fn": loss},
    )
    with pytest.warns(
        pc.RecordingWarning, match="a BatchNorm layer updates its running statistics once per micro-batch"
    ):
        pc.compile(scripted(alone=False), 2, **options).step(x, target=y)
    with pytest.raises(pc.errors.InputError, match="TorchScript cannot be deferred"):
        pc.compile(scripted(alone=True), 2, batch_norm="deferred", **options).step(x, target=y)
