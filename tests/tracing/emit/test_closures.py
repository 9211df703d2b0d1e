"""Hooks that close over tensors of the call: each micro-batch has its own."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import pipecompile as pc
from pipecompile.torch_private.modes import FakeTensorMode
from pipecompile.tracing.emit.closures import ClosedOver, rebuilt, tensor_cells
from tests.support.eager import accumulate, assert_same


def made(content: Any) -> Any:
    plain = 3
    return lambda gradient: gradient * content * plain


def test_contents_with_tensors_are_named_also_in_functions_and_containers() -> None:
    one, two = torch.ones(()), torch.full((), 2.0)
    assert tensor_cells(made(one)) == {"content": one}
    with FakeTensorMode():
        assert list(tensor_cells(made([1, {"x": torch.ones(())}]))) == ["content"]
    assert list(tensor_cells(made(made(one)))) == ["content"]
    assert tensor_cells(made(4)) == tensor_cells(len) == tensor_cells(None) == {}
    assert rebuilt(made(one), ["content"], [two])(5.0) == 30


def test_containers_with_tensors_from_before_the_call_and_assigned_variables_stay_the_users() -> None:
    one = torch.ones(())
    assert tensor_cells(made([one])) == tensor_cells(made({"x": one})) == {}

    def assigns(gradient: torch.Tensor) -> torch.Tensor:
        nonlocal one
        one = one + gradient.norm()
        return gradient * one

    assert tensor_cells(assigns) == {}


class Hooked(nn.Module):
    def __init__(self, body: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1)
        self.body = body

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c(self.body(self, x).tanh())


def scaled(model: Any, x: torch.Tensor) -> torch.Tensor:
    h = model.a(x)
    scale = h.mean()
    if h.requires_grad:
        h.register_hook(lambda gradient: gradient * scale)
    return model.b(h)


def nested(model: Any, x: torch.Tensor) -> torch.Tensor:
    h, parts = model.a(x), {"scale": [x.abs().mean()]}

    def inner(gradient: torch.Tensor) -> torch.Tensor:
        return gradient * parts["scale"][0]

    if h.requires_grad:
        h.register_hook(lambda gradient: inner(gradient) + 1)
    return model.b(h)


def implicit(model: Any, x: torch.Tensor) -> torch.Tensor:
    """Find a fixed point without gradients; its backward iterates, too (a deep equilibrium model)."""
    with torch.no_grad():
        z = torch.zeros_like(x)
        for _ in range(4):
            z = torch.tanh(model.a(z) + x)
    z = torch.tanh(model.a(z) + x)
    if z.requires_grad:
        z0 = z.clone().detach().requires_grad_()
        f0 = torch.tanh(model.a(z0) + x)

        def solve(gradient: torch.Tensor) -> torch.Tensor:
            found = gradient
            for _ in range(4):
                found = torch.autograd.grad(f0, z0, found, retain_graph=True)[0] + gradient
            return found

        z.register_hook(solve)
    return model.b(z)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("body", [scaled, nested, implicit])
@pytest.mark.parametrize(
    "options", [{}, {"checkpoint": "always"}, {"schedule": "zb-h1"}, {"dispatch": "threads"}], ids=str
)
def test_each_micro_batch_has_its_own_hook(body: Callable[..., torch.Tensor], options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model, eager = Hooked(body), Hooked(body)
    eager.load_state_dict(copy.deepcopy(model.state_dict()))
    for _ in range(2):
        x = torch.randn(7, 4)
        if "pipe" not in locals():
            pipe = pc.compile(model, 3, example_args=(x,), n_microbatches=3, cost="analytic", balance=[1, 1, 1] if body is scaled else None,
                              loss_fn=lambda y: y.square().mean(), **options)  # fmt: skip
        for part in x.split((3, 2, 2)):
            (eager(part).square().mean() * len(part) / 7).backward()
        pipe.step(x)
        for mine, theirs in zip(model.parameters(), eager.parameters(), strict=True):
            assert torch.equal(mine.grad, theirs.grad)


def test_a_variable_that_is_assigned_anew_is_refused_at_the_line_of_the_hook() -> None:
    def late(model: Any, x: torch.Tensor) -> torch.Tensor:
        h = model.a(x)
        scale = h.mean()
        if h.requires_grad:
            h.register_hook(lambda gradient: gradient * scale)  # this line
        scale = scale * 2
        return model.b(h) * scale

    with pytest.raises(pc.TraceError, match="closes over scale, which is assigned anew") as raised:
        pc.trace(Hooked(late), torch.randn(2, 4))
    assert "test_closures.py" in str(raised.value)
    closed = ClosedOver()
    closed.check()


class Notes(nn.Module):
    """Has a hook that notes norms in a list of the user's, or in a variable of a function, and scales the gradient by the first one."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.a, self.b, self.kind = nn.Linear(4, 4), nn.Linear(4, 1), kind
        self.noted = [torch.ones(())]
        self.scaled, self.last = variable()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h, noted = self.a(x).tanh(), self.noted

        def note(gradient: torch.Tensor, kept: Any = None) -> torch.Tensor:
            (noted if kept is None else kept)[0] = noted[0] / 2 + gradient.norm()
            return gradient * noted[0]

        def note_default(gradient: torch.Tensor, kept: Any = noted) -> torch.Tensor:
            return note(gradient, kept)

        if h.requires_grad:
            h.register_hook({"cell": note, "default": note_default, "variable": self.scaled}[self.kind])
        return self.b(h)


def variable() -> tuple[Any, Any]:
    last: Any = None

    def scaled(gradient: torch.Tensor) -> torch.Tensor:
        nonlocal last
        last = gradient.norm() if last is None else last / 2 + gradient.norm()
        return gradient * last

    return scaled, lambda: last


@pytest.mark.filterwarnings("ignore::pipecompile.RecordingWarning")
@pytest.mark.parametrize("kind", ["cell", "default", "variable"])
def test_a_hook_writes_into_the_users_own_containers_and_variables(kind: str) -> None:
    torch.manual_seed(0)
    model = Notes(kind)
    torch.manual_seed(0)
    eager = Notes(kind)
    pipe = pc.compile(model, 2, n_microbatches=2, loss_fn=nn.functional.mse_loss, cost="analytic")
    for _ in range(3):
        x, target = torch.randn(4, 4), torch.randn(4, 1)
        pipe.step(x, target=target)
        accumulate(eager, x, 2, nn.functional.mse_loss, target)
        assert_same(model, eager, 1e-6)
        torch.testing.assert_close([model.noted, model.last()], [eager.noted, eager.last()])


class LeavesActivation(nn.Module):
    """Leaves an activation, as for Grad-CAM, and has a hook on it of one kind."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first, self.second, self.kind = nn.Linear(4, 4), nn.Linear(4, 2), kind
        self.gradients: list[torch.Tensor] = []

    def forward(self, x):
        self.activation = hidden = self.first(x).tanh()
        scale, size = hidden.detach().abs().mean(1, keepdim=True), x.size(0)
        kinds = {
            "lambda": lambda gradient: self.gradients.append(gradient.detach()),
            "size": lambda gradient: gradient * size,
            "tensor": lambda gradient: gradient * scale,
            "default": lambda gradient, scale=scale: gradient * scale,
            "keyword": lambda gradient, *, scale=scale, size=size: gradient * scale * size,
            "partial": partial(LeavesActivation.keep, self),
            "method": self.keep,
        }
        hidden.register_hook(kinds[self.kind])
        return self.second(hidden)

    def keep(self, gradient):
        self.gradients.append(gradient.detach())


@pytest.mark.filterwarnings("ignore::pipecompile.RecordingWarning")
@pytest.mark.parametrize("kind", ["lambda", "size", "tensor", "default", "keyword", "partial", "method"])
def test_hooks_that_each_call_makes_are_those_of_the_loop(kind: str) -> None:
    torch.manual_seed(0)
    model = LeavesActivation(kind)
    eager = copy.deepcopy(model)
    pipe = pc.compile(model, 2, n_microbatches=3, loss_fn=nn.functional.mse_loss, cost="analytic", check=False)
    x, target = torch.randn(7, 4), torch.randn(7, 2)
    pipe.step(x, target=target)
    accumulate(eager, x, 3, nn.functional.mse_loss, target)
    assert_same(model, eager, 1e-6)
    for mine, other in zip(model.gradients, eager.gradients, strict=True):
        torch.testing.assert_close(mine, other)
    torch.testing.assert_close(model.activation, eager.activation)
