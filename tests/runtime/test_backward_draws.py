"""Backwards that draw random numbers give a warning, unless their draws are those of the plain loop."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import pipecompile as pc
from pipecompile.runtime.backward_draws import BackwardDraws


class Masked(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * (torch.rand_like(gradient) < 0.8)


class OfFunction(nn.Module):
    def forward(self, x):
        return Masked.apply(x)


class OfHook(nn.Module):
    def forward(self, x):
        x = x * 1
        if x.requires_grad:
            x.register_hook(lambda gradient: gradient * random.random())
        return x


class OfRegion(nn.Module):
    """Draws what its forward drew: no draw of the backward, unless the generator is its own."""

    def __init__(self, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.generator = generator

    def forward(self, x):
        return checkpoint(self.scaled, x, use_reentrant=False)

    def scaled(self, x):
        return x.tanh() * torch.empty_like(x).uniform_(generator=self.generator)


CASES: dict[str, tuple[Callable[[], nn.Module], bool]] = {
    "function": (OfFunction, True),
    "hook": (OfHook, True),
    "region": (OfRegion, False),
    "region with a generator": (lambda: OfRegion(torch.Generator().manual_seed(1)), True),
    "nothing": (nn.Tanh, False),
}


def warned(make: Callable[[], nn.Module], **options: Any) -> bool:
    model = nn.Sequential(nn.Linear(4, 4), make(), nn.Linear(4, 4), make(), nn.Linear(4, 4))
    options = {"n_microbatches": 3, "loss_fn": F.mse_loss, "cost": "analytic", "pin": {"0": 0, "4": 1}} | options
    pipe = pc.compile(model, 2, **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pipe.step(torch.randn(6, 4), target=torch.randn(6, 4))
    return any("random numbers are drawn in the backward" in str(one.message) for one in caught)


@pytest.mark.parametrize("case", CASES)
def test_draws_of_backwards_are_a_warning(case: str) -> None:
    make, is_drawing = CASES[case]
    assert warned(make) == is_drawing
    if is_drawing:
        assert not warned(make, n_microbatches=1), "the loop draws the same"


def test_a_hook_on_a_parameter_that_draws_is_a_warning() -> None:
    def layer() -> nn.Module:
        linear = nn.Linear(4, 4)
        linear.weight.register_hook(lambda gradient: gradient + torch.randn_like(gradient))
        return linear

    assert warned(layer)


def test_one_run_is_watched() -> None:
    draws, runs = BackwardDraws(), []
    run = draws.watched(lambda _: runs.append(torch.rand(len(runs))), 3)
    run(None), run(None)  # type: ignore[arg-type]
    assert (draws.stages, len(runs)) == ({3}, 2)


class Marked(torch.Tensor):
    """A subclass without behaviour of its own, as a data set may return."""


def test_the_watched_backward_leaves_gradients_of_the_class_that_eager_leaves() -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))
    x, target = torch.randn(8, 4).as_subclass(Marked), torch.randint(0, 3, (8,))
    pipe = pc.compile(model, 2, n_microbatches=2, loss_fn=F.cross_entropy, progress=False)
    pipe.step(x, target=target)
    assert [type(parameter.grad) for parameter in model.parameters()] == [torch.Tensor] * 4
