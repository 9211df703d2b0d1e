"""A loss reads what a forward leaves on layers of a model that is a container of torch's, or on layers of torch's themselves."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import pipecompile as pc
from tests.support.eager import accumulate, assert_same

pytestmark = pytest.mark.filterwarnings("ignore::pipecompile.RecordingWarning")


class Leaving(nn.Linear):
    def forward(self, x):
        self.left = super().forward(x).tanh()
        return self.left


def hooked() -> nn.Linear:
    layer = nn.Linear(4, 4)
    layer.register_forward_hook(lambda part, _, output: setattr(part, "left", output.tanh()))
    return layer


@pytest.mark.parametrize("make", [lambda: Leaving(4, 4), hooked], ids=["forward", "hook"])
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
def test_gradients_are_those_of_the_loop(make: Callable[[], nn.Module], schedule: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(make(), nn.Linear(4, 4), make(), nn.Linear(4, 2))
    eager, x, target = copy.deepcopy(model), torch.randn(8, 4), torch.randn(8, 2)

    def loss_of(owner: nn.Sequential) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
        return lambda output, target: F.mse_loss(output, target) + owner[0].left.square().mean()

    devices = ["cpu"] * (2 if schedule == "interleaved" else 4)
    options = {"schedule": schedule, "devices": devices, "cost": "analytic"}
    pc.compile(model, 4, n_microbatches=4, loss_fn=loss_of(model), **options).step(x, target=target)
    accumulate(eager, x, 4, loss_of(eager), target)
    assert_same(model, eager, 1e-6)
