from __future__ import annotations

import math
import random

import pytest
import torch
from torch import nn

from pipecompile.tracing.state.preserved_run import preserved, state_tensors, untouched
from tests.support.model_state import ModelState


class Sly(nn.Module):
    """Has every kind of state that a forward may change."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("seen", torch.tensor([1.0, math.nan]))
        self.constant = torch.ones(2)
        self.cache: dict[str, int] = {}
        self.log = ["start"]


def meddle(model: Sly) -> None:
    """Change all of it, then fail."""
    model.seen = torch.zeros(3)
    model.cache["calls"] = 1
    model.log.append("ran")
    vars(model)["fresh"] = 1
    model.eval()
    model.linear.weight = nn.Parameter(torch.zeros(5))
    model.linear.bias.requires_grad_(False)
    model.linear.bias.grad = torch.ones(2)
    torch.rand(3)
    random.random()
    torch._C._set_grad_enabled(False)
    raise ZeroDivisionError


def test_structure_and_modes_come_back_also_after_an_error() -> None:
    model = Sly()
    seen, cache = model.seen, model.cache
    before, dice = ModelState(model.linear), random.getstate()
    with pytest.raises(ZeroDivisionError), untouched(model):
        meddle(model)
    before.check()
    assert random.getstate() == dice
    assert model.seen is seen
    assert model.cache is cache
    assert (model.cache, model.log, hasattr(model, "fresh")) == ({}, ["start"], False)


def test_open_autocast_regions_are_left() -> None:
    dtype = torch.get_autocast_dtype("cpu")
    with untouched(nn.Linear(1, 1)):
        torch.amp.autocast("cpu", torch.float16).__enter__()  # type: ignore[no-untyped-call]
        torch.amp.autocast("cpu", torch.float16).__enter__()  # type: ignore[no-untyped-call]
    assert not torch.is_autocast_enabled("cpu")
    assert torch.get_autocast_dtype("cpu") == dtype
    assert (torch.autocast_increment_nesting(), torch.autocast_decrement_nesting()) == (1, 0)


def test_autocast_of_the_caller_stays() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        with untouched(nn.Linear(1, 1)):
            torch.amp.autocast("cpu", enabled=False).__enter__()  # type: ignore[no-untyped-call]
        assert torch.is_autocast_enabled("cpu")


def test_contents_come_back_bit_for_bit() -> None:
    tensor, untold = torch.tensor([1.0, math.nan, -0.0]), nn.BatchNorm1d(2)
    bits = tensor.view(torch.int32).clone()
    with preserved([tensor, untold.running_mean]):  # type: ignore[list-item]
        tensor.fill_(7.0)
        untold(torch.randn(4, 2) + 3)
    assert torch.equal(tensor.view(torch.int32), bits)
    assert torch.equal(untold.running_mean, torch.zeros(2))  # type: ignore[arg-type]


def test_restoring_contents_does_not_disturb_a_pending_backward() -> None:
    weight = torch.ones(2, requires_grad=True)
    loss = (weight * weight).sum()
    with preserved([weight]):
        weight.data.fill_(5.0)
    (gradient,) = torch.autograd.grad(loss, weight)
    assert torch.equal(gradient, torch.full((2,), 2.0))


def test_state_tensors_are_each_there_once() -> None:
    model = Sly()
    model.tied = model.linear
    names = [id(model.linear.weight), id(model.linear.bias), id(model.seen), id(model.constant)]
    assert [id(tensor) for tensor in state_tensors(model)] == names
