"""Errors of kernels in a backward: the line of the forward, in whatever way the backward runs."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import pipecompile as pc
from pipecompile.runtime.failed_backward import forward_line

pytestmark = pytest.mark.smoke


TURN = torch.tensor([[0.0, 5.0], [-5.0, 0.0]])


class Spoilt(nn.Module):
    """Writes into a tensor that an operation has saved: the error comes in the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(self.a(x).relu())
        k = h.exp()
        g = k.sin()  # fails
        with torch.no_grad():
            k.add_(1)
        return self.b(g) + h


class Gauge(Spoilt):
    """The kernel of the backward refuses, by the values of the gradient: eigenvectors have any phase."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x).unflatten(1, (2, 2))
        _, vectors = torch.linalg.eig(h + TURN)  # fails
        return self.b(torch.view_as_real(vectors).flatten(1)[:, :4])


class Unsaved(Spoilt):
    """Beside operations that save nothing, and one in place."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x)
        h.tanh_()
        h = (h.unflatten(1, (2, 2)) + 1) * 0.1
        _, vectors = torch.linalg.eig(h + TURN)  # fails
        q = torch.view_as_real(vectors).flatten(1)[:, :4] * 2
        return self.b(q.cumsum(1).roll(1, 1))


class Root(Spoilt):
    """The square root of 0 has no gradient: anomaly detection raises after the node has freed what it saved."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x) * 0
        h = h.sqrt() * 0  # fails
        return self.b(h.sin())


class Quiet(Spoilt):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.norm(self.a(x)))


def square(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


def phase(output: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(torch.linalg.eig(output.unflatten(1, (2, 2)) + TURN)[1])[..., 0].exp().mean()


def place(model: type[nn.Module]) -> str:
    lines, start = inspect.getsourcelines(model)
    line = start + next(i for i, text in enumerate(lines) if text.endswith("# fails\n"))
    return f"{Path(__file__)}:{line} in {model.__qualname__}.forward"


def compiled(model: type[nn.Module], loss_fn: Callable[..., Any] = square, **options: Any) -> pc.Pipeline:
    torch.manual_seed(0)
    return pc.compile(
        model(), 2, example_args=(torch.randn(4, 4),), n_microbatches=2, loss_fn=loss_fn, cost="analytic",
        devices=["cpu"] * 2, **options,
    )  # fmt: skip


WAYS = {
    "inline": {},
    "threads": {"dispatch": "threads"},
    "checkpointed": {"checkpoint": "always"},
    "split": {"schedule": "zb-h1"},
    "split, threads": {"schedule": "zb-h1", "dispatch": "threads"},
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("model", [Spoilt, Gauge, Unsaved])
def test_an_error_of_a_kernel_names_the_line_of_the_forward(model: type[nn.Module], way: str) -> None:
    with pytest.raises(pc.RunError) as caught:
        compiled(model, **WAYS[way]).step(torch.randn(4, 4))
    assert caught.value.where.startswith(f"{place(model)} (in ")
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_a_call_whose_backward_comes_later_names_it_as_well() -> None:
    output = compiled(Spoilt)(torch.randn(4, 4))
    with pytest.raises(pc.RunError) as caught:
        output.sum().backward()
    assert caught.value.where == f"{place(Spoilt)} (in SinBackward0)"


@pytest.mark.filterwarnings("ignore:Error detected in", "ignore:Anomaly Detection")
def test_detected_anomalies_name_the_line() -> None:
    pipe = compiled(Root)
    with pytest.raises(pc.RunError) as caught, torch.autograd.detect_anomaly():
        pipe.step(torch.randn(4, 4))
    assert caught.value.where == f"{place(Root)} (in SqrtBackward0)"


def test_an_error_in_the_backward_of_the_loss_says_so() -> None:
    with pytest.raises(pc.RunError) as caught:
        compiled(Quiet, phase).step(torch.randn(4, 4))
    assert caught.value.where == "the loss function, in LinalgEigBackward0"


def test_under_autocast_too() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        pipe = compiled(Spoilt)
        with pytest.raises(pc.RunError) as caught:
            pipe.step(torch.randn(4, 4))
    assert caught.value.where.startswith(place(Spoilt))


@pytest.mark.parametrize("context", [nullcontext, torch.autograd.graph.save_on_cpu])
def test_an_error_of_a_hook_names_the_line_of_the_hook(context: Callable[[], Any]) -> None:
    def fail(_gradient: torch.Tensor) -> None:
        raise ValueError("in a hook")

    pipe = compiled(Quiet)
    pipe.model.a.weight.register_hook(fail)  # type: ignore[union-attr,operator]
    with pytest.raises(pc.RunError) as caught, context():
        pipe.step(torch.randn(4, 4))
    assert 'raise ValueError("in a hook")' in caught.value.where


def test_an_error_elsewhere_has_no_line() -> None:
    assert forward_line(ValueError("no traceback"), torch.fx.Graph()) == ""
