"""A loss that reads gradients, by `torch.autograd.grad` and hooks: whole gradients, or a refusal."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import grad as differentiated

import pipecompile as pc
from pipecompile.errors import RunError


class Generator(nn.Module):
    """Gives an image and the latents that it is made from, in every stage anew."""

    def __init__(self) -> None:
        super().__init__()
        self.map, self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, z: torch.Tensor) -> Any:
        w = self.map(z)
        h = self.first(w).tanh()
        return (self.second(h) + w).tanh() * w, w, h


def _penalty(values: Any, sources: Any, **options: Any) -> torch.Tensor:
    found = differentiated(values.square().sum(), sources, create_graph=True, **options)
    return sum((one.square().mean() for one in found if one is not None), values.square().mean())


def by_latents(output: Any) -> torch.Tensor:
    return _penalty(output[0], output[1])


def between_outputs(output: Any) -> torch.Tensor:
    return _penalty(output[2], output[1], allow_unused=True)


def by_backward(output: Any) -> torch.Tensor:
    output[1].retain_grad()
    output[0].sum().backward(retain_graph=True, inputs=[output[1]])
    return output[0].mean() + output[1].grad.square().mean()


def by_hook(output: Any) -> torch.Tensor:
    output[1].register_hook(lambda gradient: gradient * 2)
    return output[0].mean()


def by_kept_gradient(output: Any) -> torch.Tensor:
    output[1].retain_grad()
    return output[0].mean()


def by_hook_on_hidden(output: Any) -> torch.Tensor:
    output[2].register_hook(lambda gradient: gradient * 2)
    return output[0].mean()


def by_hidden(output: Any) -> torch.Tensor:
    return _penalty(output[0], output[2])


def by_latents_in_the_loss_alone(output: Any) -> torch.Tensor:
    return _penalty(output[1], output[1]) + output[0].mean()


def stepped(loss: Callable[..., torch.Tensor], stages: int) -> float:
    torch.manual_seed(0)
    model, z = Generator(), torch.randn(4, 3)
    reference = copy.deepcopy(model)
    options: dict[str, Any] = {
        "n_microbatches": 1,
        "cost": "analytic",
        "across_batch": "each",
        "pin": {"map": 0, "second": stages - 1},
    }
    pipe = pc.compile(model, stages, devices=["cpu"] * stages, loss_fn=loss, **options)
    pipe.step(z)
    loss(reference(z)).backward()
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    return max(float((mine.grad - theirs.grad).abs().max()) for mine, theirs in pairs)  # type: ignore[operator]


@pytest.mark.filterwarnings("ignore:the loss was not recognised", "ignore:the loss is a sum")
@pytest.mark.parametrize("loss", [by_hidden, by_latents_in_the_loss_alone, by_hook_on_hidden])
def test_gradients_that_lie_in_the_last_stage_are_those_of_eager(loss: Callable[..., torch.Tensor]) -> None:
    assert stepped(loss, 2) < 1e-6


@pytest.mark.filterwarnings("ignore:the loss was not recognised", "ignore:the loss is a sum")
@pytest.mark.parametrize("loss", [by_latents, between_outputs, by_backward, by_hook, by_kept_gradient])
def test_gradients_through_earlier_stages_are_refused(loss: Callable[..., torch.Tensor]) -> None:
    with pytest.raises(RunError, match="would leave out the gradients"):
        stepped(loss, 3)


class Tied(nn.Module):
    """A table at both ends."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.mix, self.bias = nn.Embedding(5, 4), nn.Linear(4, 4), nn.Parameter(torch.zeros(5))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.mix(self.table(ids)).tanh() @ self.table.weight.T + self.bias


@pytest.mark.filterwarnings("ignore:the loss was not recognised", "ignore:the loss is a sum")
@pytest.mark.parametrize("name", ["table.weight", "bias"])
def test_a_weight_of_an_earlier_stage_is_refused(name: str) -> None:
    model = Tied()
    weight = model.get_parameter(name)
    pipe = pc.compile(
        model, 2, devices=["cpu"] * 2, n_microbatches=1, cost="analytic", tied="apart",
        loss_fn=lambda output: _penalty(output, [weight], allow_unused=True),
    )  # fmt: skip
    if name == "bias":
        assert pipe.step(torch.arange(4)) > 0
        return
    with pytest.raises(RunError, match="would leave out the gradients"):
        pipe.step(torch.arange(4))


@pytest.mark.parametrize("n_stages", [1, 2])
def test_a_backward_in_a_loss_that_is_recomputed_is_refused(n_stages: int) -> None:
    """Both runs of the loss added to `.grad`."""

    def loss(output: Any) -> torch.Tensor:
        value = output[0].square().mean()
        value.backward(retain_graph=True)
        return value

    z, model = torch.randn(4, 3), Generator()
    eager = copy.deepcopy(model)
    for part in z.chunk(2):
        (loss(eager(part)) / 2).backward()
    options: dict[str, Any] = {"example_args": (z,), "n_microbatches": 2, "loss_fn": loss, "cost": "analytic"}
    pc.compile(model, n_stages, **options).step(z)
    for ours, theirs in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)
    model.zero_grad()
    with pytest.raises(RunError, match=r"the loss calls backward\(\), and is recomputed"):
        pc.compile(model, n_stages, **options, checkpoint="always").step(z)
    assert all(parameter.grad is None for parameter in model.parameters())
