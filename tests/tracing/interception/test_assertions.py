"""Assertions on values are taken for granted while recording, and checked in every run; other branches are kept whole."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import pipecompile as pc


class Checked(nn.Module):
    def __init__(self, check) -> None:
        super().__init__()
        self.layer, self.check = nn.Linear(4, 4), check

    def forward(self, x):
        y = self.layer(x)
        self.check(x, y)
        return y * 2


def asserts(x, y):
    assert y.isfinite().all(), "not finite"


def raises(x, y):
    if torch.isnan(y).any():
        print("about to raise")
        raise ValueError("nan")


def negates(x, y):
    if not (y.abs() < 1e6).all():
        raise ValueError("large")


def several(x, y):
    if x.dim() != 2 or y.isnan().any() or (y > 1e6).any():
        raise ValueError("wrong")


def asserted_by_torch(x, y):
    torch._assert(y.isfinite().all(), "not finite")


def falls_into_assert_false(x, y):
    if y.ne(y).any():
        torch._assert(False, "nan")


HELD = [asserts, raises, negates, several, asserted_by_torch, falls_into_assert_false]


@pytest.mark.parametrize("check", HELD, ids=lambda check: check.__name__)
def test_what_is_taken_for_granted_is_checked_in_every_run(check):
    model = Checked(check)
    pipe = pc.compile(model, 2, n_microbatches=2, cost="analytic", loss_fn=lambda y: y.square().mean())
    x = torch.randn(4, 4)
    torch.testing.assert_close(pipe(x), model(x))
    pipe.step(x)
    x[3, 0] = float("nan")
    with pytest.raises(pc.RunError, match="assertion on the values of a tensor fails") as caught:
        pipe(x)
    assert isinstance(caught.value.__cause__, AssertionError)
    assert caught.value.microbatch == 1
    assert f"{__file__}:" in str(caught.value)


def chooses(x, y):
    if y.sum() > 0:
        y += 1


def mixed(x, y):
    if y.isnan().any() or not y.isfinite().all():
        raise ValueError("wrong")


def chained(x, y):
    assert 0 <= y.abs().sum() < 1e9


def waits(x, y):
    while y.sum() > 1e9:
        raise ValueError("large")


@pytest.mark.parametrize("check", [chooses, mixed, chained, waits], ids=lambda check: check.__name__)
def test_other_branches_are_kept_whole_and_run(check):
    model = Checked(check)
    graph = pc.trace(model, torch.randn(4, 4))
    (reason,) = graph.facts.kept
    assert (reason.fault.code, reason.fault.function) == ("PC101", check.__name__)
    for x in (torch.rand(3, 4), -torch.rand(3, 4)):
        torch.testing.assert_close(graph(x), model(x))
