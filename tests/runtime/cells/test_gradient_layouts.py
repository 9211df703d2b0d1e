"""Gradients that cross stages have the strides that they have in eager."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import pipecompile as pc
from pipecompile.runtime.cells.gradient_layouts import Layout, gradient_of, keep_layout
from pipecompile.torch_private.autograd_engine import hooks_of_tensor, hooks_registered
from tests.support.eager import accumulate

pytestmark = pytest.mark.smoke


class Patches(nn.Module):
    """Images to tokens by `transpose`: the gradient of the tokens is contiguous, and the tokens are not."""

    def __init__(self) -> None:
        super().__init__()
        self.images = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))
        self.tokens, self.head = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.images(x).flatten(2).transpose(1, 2)
        x = x + self.tokens(F.layer_norm(x, (8,)))
        return self.head(x.mean(1))


@pytest.mark.parametrize("schedule", [{"schedule": "gpipe"}, {"schedule": "1f1b", "checkpoint": "always"}, {"schedule": "zb-h1"}])  # fmt: skip
def test_a_single_sample_has_the_gradients_of_eager(schedule: dict[str, Any]) -> None:
    model, x, y = Patches(), torch.randn(3, 3, 6, 6), torch.randint(4, (3,))
    twin = copy.deepcopy(model)
    accumulate(twin, x, 3, F.cross_entropy, y)
    pipe = pc.compile(model, 3, n_microbatches=3, loss_fn=F.cross_entropy, devices=["cpu"] * 3, cost="analytic",
                      batch_norm="each", **schedule)  # fmt: skip
    pipe.step(x, target=y)
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


def leaf_of(strides: tuple[int, int], known: set[Layout] | None = None) -> torch.Tensor:
    leaf = torch.empty_strided((2, 3), strides).zero_().requires_grad_()
    keep_layout(leaf, 0, set() if known is None else known)
    return leaf


def test_a_dense_gradient_keeps_its_strides() -> None:
    leaf = leaf_of((1, 2))
    leaf.backward(gradient := torch.randn(2, 3))
    found = gradient_of(leaf)
    assert found is not None
    assert found.stride() == (3, 1)
    assert torch.equal(found, gradient)
    assert gradient_of(leaf) is leaf.grad


def test_a_layout_is_known_once_a_gradient_has_come_in_it() -> None:
    known: set[Layout] = set()
    leaf_of((1, 2), known).backward(torch.randn(2, 3))
    assert not known
    leaf_of((3, 1), known).backward(torch.randn(2, 3))
    assert known == {(0, torch.Size((2, 3)), (3, 1))}
    assert hooks_of_tensor(leaf_of((3, 1), known)) is None
    assert hooks_of_tensor(leaf_of((1, 2), known))


def test_a_gradient_that_overlaps_itself_becomes_dense() -> None:
    leaf = leaf_of((3, 1))
    leaf.sum().backward()
    assert gradient_of(leaf) is leaf.grad
    assert leaf.grad.stride() == (3, 1)


def test_several_backwards_are_added_up() -> None:
    leaf = leaf_of((1, 2))
    for _ in range(2):
        leaf.backward(torch.ones(2, 3))
    assert torch.equal(gradient_of(leaf), torch.full((2, 3), 2.0))


def test_the_hook_is_not_counted_as_one_of_the_stage() -> None:
    before = hooks_registered()
    leaf_of((1, 2))
    assert hooks_registered() == before


def test_an_input_without_a_gradient_has_none() -> None:
    leaf = leaf_of((1, 2))
    NoGradient.apply(leaf).sum().backward()
    assert gradient_of(leaf) is None


class NoGradient(torch.autograd.Function):
    """Returns no gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> None:
        return None
