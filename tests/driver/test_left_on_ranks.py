"""Warnings of what the loss and backwards read and stages on other ranks leave. The stages of a process stand for those of ranks."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import pipecompile as pc
from pipecompile.driver.left_on_ranks import warn_of_ranks


class Leaves(nn.Module):
    """Leaves tensors in an attribute and a list, and counts."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.aux: Any = None
        self.seen: list[Any] = []
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        self.aux = y.square().mean()
        self.seen.append(y.mean())
        self.calls += 1
        return y.tanh()


class Hooked(nn.Sequential):
    """A hook leaves what it gets in a dict."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        self.features: dict[str, Any] = {}
        self[0].register_forward_hook(lambda _m, _i, output: self.features.__setitem__("first", output))


class Config:
    """Of the user's, and no place where a forward leaves anything."""

    smoothing = 0.1


def of_attribute(model: nn.Module) -> Any:
    return lambda output, target: F.cross_entropy(output, target) + model[0].aux


def of_list(model: nn.Module) -> Any:
    return lambda output, target: F.cross_entropy(output, target) + model[0].seen[-1]


def of_count(model: nn.Module) -> Any:
    return lambda output, target: F.cross_entropy(output, target) * model[0].calls


def of_features(model: nn.Module) -> Any:
    return lambda output, target: F.cross_entropy(output, target) + model[0].features["first"].mean()


def of_weights(model: nn.Module) -> Any:
    return lambda output, target: F.cross_entropy(output, target) + 1e-3 * model[1].weight.square().sum()


def of_config(_model: nn.Module) -> Any:
    config = Config()
    return lambda output, target: F.cross_entropy(output, target, label_smoothing=config.smoothing)


@pytest.mark.parametrize(
    ("first", "loss", "named"),
    [
        (Leaves, of_attribute, "'aux'"),
        (Leaves, of_list, "'seen'"),
        (Leaves, of_count, ""),  # the last stage counts
        (Hooked, of_features, "what its hooks"),
        (Leaves, of_weights, ""),
        (Leaves, of_config, ""),
        (Hooked, of_config, ""),
    ],
)
def test_what_the_loss_reads_of_other_ranks_is_named(
    first: type[nn.Module], loss: Callable[[nn.Module], Any], named: str
) -> None:
    model = nn.Sequential(first(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pipe = pc.compile(
            model, 2, example_args=(torch.randn(4, 4),), n_microbatches=2, loss_fn=loss(model), cost="analytic",
            split_before=["1"],
        )  # fmt: skip
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_of_ranks(pipe._cache.latest)
    texts = [str(one.message) for one in caught]
    assert len(texts) == bool(named)
    assert all(f"leaves {named}" in one and "on objects that the loss reads" in one for one in texts)


class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, holder: nn.Module) -> torch.Tensor:
        ctx.holder = holder
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient * ctx.holder.scale, None


class Scaled(nn.Module):
    """A backward reads an attribute that the forward leaves behind the last layer."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.a, self.b, self.scale = kind, nn.Linear(4, 4), nn.Linear(4, 4), torch.ones(())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x)
        if self.kind == "hook" and h.requires_grad:
            h.register_hook(lambda gradient: gradient * self.scale)
        if self.kind == "hook with a list" and h.requires_grad:
            seen: list[torch.Tensor] = []
            h.register_hook(lambda gradient: seen.append(gradient) or gradient * self.scale)
        if self.kind == "other hook" and h.requires_grad:
            h.register_hook(lambda gradient: gradient * 2)
        if self.kind == "function":
            h = Scale.apply(h, self)
        y = self.b(h)
        self.scale = y.detach().abs().mean()
        return y


@pytest.mark.parametrize(
    ("kind", "warns"), [("hook", True), ("hook with a list", True), ("function", True), ("other hook", False)]
)
def test_what_a_backward_reads_of_other_ranks_is_named(kind: str, warns: bool) -> None:
    pipe = pc.compile(
        Scaled(kind), 2, example_args=(torch.randn(4, 4),), n_microbatches=2, loss_fn=F.mse_loss, cost="analytic",
        split_before=["b"],
    )  # fmt: skip
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_of_ranks(pipe._cache.latest)
    assert [str(one.message)[:75] for one in caught] == [
        "a hook or an autograd function of stage 0 names an attribute that stage 1, on another rank"[:75]
    ] * warns


class Sharing(nn.Module):
    """Hooks of two layers share a list that forward makes, or each have one."""

    def __init__(self, *, is_one: bool) -> None:
        super().__init__()
        self.is_one, self.a, self.b = is_one, nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first: list[torch.Tensor] = []
        second = first if self.is_one else list[torch.Tensor]()
        h = self.a(x)
        h.register_hook(lambda gradient: gradient * len(second))
        y = self.b(h)
        y.register_hook(first.append)
        return y


@pytest.mark.parametrize("is_one", [True, False])
def test_a_list_of_one_call_for_functions_on_two_ranks_is_named(is_one: bool) -> None:
    x = torch.randn(4, 4)
    pipe = pc.compile(
        Sharing(is_one=is_one),
        2,
        example_args=(x,),
        n_microbatches=2,
        loss_fn=F.mse_loss,
        cost="analytic",
        split_before=["b"],
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_of_ranks(pipe._cache.latest)
    assert ["are on different ranks" in str(one.message) for one in caught] == [True] * is_one
