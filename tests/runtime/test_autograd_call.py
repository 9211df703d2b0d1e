"""`pipe(x)` as one autograd function: its backward runs the other half of the program, once."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import pipecompile as pc


@pytest.fixture
def models() -> tuple[pc.Pipeline, nn.Module]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    plain = copy.deepcopy(model)
    return pc.compile(model, 2, n_microbatches=2, cost="analytic", devices=["cpu"] * 2), plain


def test_outputs_and_gradients_are_those_of_the_model(models: tuple[pc.Pipeline, nn.Module]) -> None:
    pipe, plain = models
    x = torch.randn(4, 3)
    mine, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    made, expected = pipe(mine), plain(theirs)
    assert made.grad_fn is not None
    torch.testing.assert_close(made, expected)
    made.square().sum().backward()
    expected.square().sum().backward()
    torch.testing.assert_close(mine.grad, theirs.grad)
    for one, other in zip(pipe.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


def test_parameters_get_gradients_when_the_input_needs_none(models: tuple[pc.Pipeline, nn.Module]) -> None:
    models[0](torch.randn(4, 3)).sum().backward()
    assert all(parameter.grad is not None for parameter in models[0].parameters())


def test_a_second_backward_is_refused(models: tuple[pc.Pipeline, nn.Module]) -> None:
    made = models[0](torch.randn(4, 3)).sum()
    made.backward(retain_graph=True)
    with pytest.raises(pc.InputError, match="a second time"):
        made.backward()


def test_gradients_of_gradients_are_refused(models: tuple[pc.Pipeline, nn.Module]) -> None:
    made = models[0](torch.randn(4, 3)).sum()
    with pytest.raises(pc.InputError, match="differentiated twice"):
        made.backward(create_graph=True)


def test_without_gradients_nothing_waits_for_a_backward(models: tuple[pc.Pipeline, nn.Module]) -> None:
    with torch.no_grad():
        assert models[0](torch.randn(4, 3)).grad_fn is None
