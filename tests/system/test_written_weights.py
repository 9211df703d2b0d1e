"""Weights that a forward changes: a step equals the loop, in which each backward finds the weights that its own forward has left."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import pipecompile as pc
from tests.support.eager import accumulate, assert_same, square_loss


class Critic(nn.Module):
    """Has a weight that `change` writes before it is used."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.limited, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)

    def change(self) -> None:
        """Change the weight."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.change()
        return self.last(self.limited(self.first(x).relu()).relu())


class Clamps(Critic):
    def change(self) -> None:
        with torch.no_grad():
            self.limited.weight.clamp_(-0.2, 0.2)


class Decays(Critic):
    def change(self) -> None:
        with torch.no_grad():
            self.limited.weight.mul_(0.9)


class DecaysData(Critic):
    """Writes through `.data`, which leaves no new version."""

    def change(self) -> None:
        self.limited.weight.data.mul_(0.9)


class Replaces(Critic):
    def change(self) -> None:
        self.limited.weight.data = self.limited.weight.data * 0.9


class Lists(Critic):
    def change(self) -> None:
        torch._foreach_mul_([self.limited.weight.data, self.last.weight.data], 0.9)


class Branches(Critic):
    """Is kept whole where it looks at the values."""

    def change(self) -> None:
        if float(self.limited.weight.detach().abs().max()) > 0.01:
            self.limited.weight.data.mul_(0.9)


def _decay(layer: nn.Module, _args: Any) -> None:
    layer.weight.data.mul_(0.9)


class Hooked(Critic):
    def __init__(self) -> None:
        super().__init__()
        self.limited.register_forward_pre_hook(_decay)


class HookExchanges(Critic):
    def __init__(self) -> None:
        super().__init__()
        self.limited.register_forward_pre_hook(self.decay)

    def decay(self, layer: nn.Module, _args: Any) -> None:
        layer.weight.data = layer.weight.data * 0.9


class HookOfAnother(HookExchanges):
    """A recomputation of the layer before would write the weight once more."""

    def decay(self, layer: nn.Module, _args: Any) -> None:
        self.last.weight.data.mul_(0.9)


class HookedLater(HookExchanges):
    """The first calls write nothing."""

    calls = 0

    def decay(self, layer: nn.Module, _args: Any) -> None:
        self.calls += 1
        if self.calls > 4:
            layer.weight.data.mul_(0.9)


class HookedNorm(Critic):
    """A layer in evaluation mode, whose buffers nothing writes."""

    def __init__(self) -> None:
        super().__init__()
        self.limited = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)).eval()
        self.limited[1].register_forward_pre_hook(_decay)


class _OwnLinear(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.weight.data.mul_(0.9)
        return super().forward(x)


class Watched(Critic):
    """A layer of the user's own that is one node, because of its backward hook."""

    def __init__(self) -> None:
        super().__init__()
        self.limited = _OwnLinear(8, 8)
        self.limited.register_full_backward_hook(lambda *_: None)


SETTINGS = {
    "gpipe": {"schedule": "gpipe"},
    "1f1b": {"schedule": "1f1b"},
    "zb-h1": {"schedule": "zb-h1"},
    "threads": {"schedule": "gpipe", "dispatch": "threads"},
    "always": {"schedule": "gpipe", "checkpoint": "always"},
    "except_last": {"schedule": "gpipe", "checkpoint": "except_last"},
}

MODELS = [
    Clamps,
    Decays,
    DecaysData,
    Replaces,
    Lists,
    Branches,
    Hooked,
    HookExchanges,
    HookOfAnother,
    HookedNorm,
    HookedLater,
    Watched,
]


@pytest.mark.sampled(8)
@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("make", MODELS)
def test_a_backward_finds_the_weights_of_its_own_forward(make: Callable[[], Critic], settings: str) -> None:
    torch.manual_seed(0)
    model, x = make().double(), torch.randn(8, 8).double()
    reference = copy.deepcopy(model)
    pipe = pc.compile(
        model, 2, example_args=(x,), n_microbatches=4, loss_fn=square_loss, cost="analytic", devices=["cpu"] * 2,
        split_before=["limited"], **SETTINGS[settings],
    )  # fmt: skip
    for _ in range(2):
        assert pipe.step(x) == pytest.approx(accumulate(reference, x, 4).item(), rel=1e-12)
        assert_same(model, reference, 1e-12)
        for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            assert torch.equal(mine, theirs)
