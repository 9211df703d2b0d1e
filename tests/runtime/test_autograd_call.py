"""`pipe(x)` as one autograd function: its backward runs the other half of the program, once."""

from __future__ import annotations

import copy
from functools import partial

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


def _chunked(eager: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return torch.cat([eager(part) for part in x.chunk(4)]).square().mean()


def _gradients(model: nn.Module) -> list[torch.Tensor | None]:
    return [None if own.grad is None else own.grad.clone() for own in model.parameters()]


ASKED = {
    "the input": lambda loss, x, model: torch.autograd.grad(loss, x),
    "parameters": lambda loss, x, model: torch.autograd.grad(loss, list(model.parameters())),
    "both": lambda loss, x, model: torch.autograd.grad(loss, [x, *model.parameters()]),
    "the input, by backward": lambda loss, x, model: loss.backward(inputs=[x]),
    "a parameter, by backward": lambda loss, x, model: loss.backward(inputs=[next(model.parameters())]),
}


@pytest.mark.parametrize("kind", ASKED)
def test_only_the_gradients_that_are_asked_for(kind: str, models: tuple[pc.Pipeline, nn.Module]) -> None:
    """`torch.autograd.grad(pipe(x), x)` added to `.grad` of all parameters, and gave none for parameters."""
    pipe, eager = models
    results = []
    for model, loss_of in ((pipe.model, lambda x: pipe(x).square().mean()), (eager, partial(_chunked, eager))):
        x = torch.ones(4, 3, requires_grad=True)
        for own in model.parameters():
            own.grad = torch.ones_like(own)
        results.append((ASKED[kind](loss_of(x), x, model), x.grad, _gradients(model)))
    torch.testing.assert_close(*results)


def test_hooks_of_parameters_get_the_whole_gradient_once(models: tuple[pc.Pipeline, nn.Module]) -> None:
    """Hooks ran once per micro-batch, on its part of the gradient: what clips is then another gradient."""
    pipe, eager = models
    counts = []
    for model, loss_of in ((pipe.model, lambda x: pipe(x).square().mean()), (eager, partial(_chunked, eager))):
        calls: list[torch.Tensor] = []
        for own in model.parameters():
            own.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
            own.register_post_accumulate_grad_hook(calls.append)
        loss_of(torch.ones(4, 3)).backward()
        counts.append((len(calls), _gradients(model)))
    torch.testing.assert_close(*counts)


def test_parameters_that_are_computed_from_others_are_refused_before_anything_runs(
    models: tuple[pc.Pipeline, nn.Module],
) -> None:
    pipe, plain = models
    x = torch.randn(4, 3)
    leaves = {name: value.detach().exp().requires_grad_() for name, value in pipe.named_parameters()}
    made = torch.func.functional_call(pipe, leaves, (x,))
    expected = torch.func.functional_call(plain, {n: v.detach().exp() for n, v in plain.named_parameters()}, (x,))
    torch.testing.assert_close(made, expected)
    computed = {name: value.exp() for name, value in pipe.named_parameters()}

    with pytest.raises(pc.InputError, match=r"the parameter '0\.weight' is computed from other tensors"):
        torch.func.functional_call(pipe, computed, (x,))

    assert all(parameter.grad is None for parameter in pipe.parameters())
    with torch.no_grad():  # nothing to differentiate
        torch.testing.assert_close(torch.func.functional_call(pipe, computed, (x,)), expected)
