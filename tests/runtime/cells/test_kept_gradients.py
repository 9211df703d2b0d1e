"""Gradients that a forward or a loss keeps with `retain_grad` are those of the plain loop, with recomputation and in calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import pipecompile as pc
from pipecompile.runtime.cells.kept_gradients import names_retain_grad
from tests.support.eager import square_loss


class Keeps(nn.Module):
    """Keeps the gradient of a hidden value of each micro-batch; `writes` says whether it then writes into the value."""

    def __init__(self, *, writes: bool = False) -> None:
        super().__init__()
        self.a, self.b, self.writes, self.seen = nn.Linear(4, 4), nn.Linear(4, 4), writes, []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.a(x).sin()
        hidden.retain_grad()
        if self.writes:
            hidden.mul_(2)
        self.seen.append(hidden)
        return self.b(hidden) + hidden


class KeepsInPiece(Keeps):
    """The same in a piece that cannot be recorded."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x if float(x.detach().sum()) < 1e9 else -x)


def gradients(body: Keeps, run: Callable[[nn.Module], Any]) -> list[torch.Tensor | None]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), body, nn.Linear(4, 4))
    for own in model.parameters():
        nn.init.normal_(own)
    run(model)
    return [one.grad for one in body.seen]


def by_step(x: torch.Tensor, **options: Any) -> Callable[[nn.Module], Any]:
    def run(model: nn.Module) -> None:
        given = {"n_microbatches": 2, "loss_fn": square_loss, "cost": "analytic", "devices": ["cpu"] * 2} | options
        pc.compile(model, 2, **given).step(x)

    return run


def by_loop(x: torch.Tensor) -> Callable[[nn.Module], Any]:
    def run(model: nn.Module) -> None:
        for part in x.chunk(2):
            (square_loss(model(part)) / 2).backward()

    return run


@pytest.mark.sampled(2)
@pytest.mark.parametrize("options", [{"checkpoint": "always"}, {"checkpoint": "always", "schedule": "zb-h1"}, {}])
@pytest.mark.parametrize("body", [Keeps, lambda: Keeps(writes=True), KeepsInPiece])
def test_a_step_gives_kept_gradients(body: Callable[[], Keeps], options: dict[str, Any]) -> None:
    x = torch.randn(6, 4)
    mine, eager = gradients(body(), by_step(x, **options)), gradients(body(), by_loop(x))
    assert len(mine) == len(eager) == 2
    assert all(torch.equal(one, other) for one, other in zip(mine, eager, strict=True))


@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_a_call_gives_kept_gradients(checkpoint: str) -> None:
    x = torch.randn(6, 4)

    def call(model: nn.Module) -> None:
        pipe = pc.compile(model, 2, n_microbatches=1, cost="analytic", devices=["cpu"] * 2, checkpoint=checkpoint)
        square_loss(pipe(x)).backward()

    (mine,), (eager,) = gradients(Keeps(), call), gradients(Keeps(), lambda model: square_loss(model(x)).backward())
    torch.testing.assert_close(mine, eager)


def test_a_loss_may_keep_the_gradients_of_outputs() -> None:
    seen = []

    def loss(output: torch.Tensor) -> torch.Tensor:
        output.retain_grad()
        seen.append(output)
        return square_loss(output)

    gradients(Keeps(), by_step(torch.randn(6, 4), loss_fn=loss, checkpoint="always"))
    assert [one.grad is not None for one in seen] == [True, True]


class Branches(nn.Module):
    """A layer that `torch.jit.script` compiles, and that no recording can hold."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if bool(x.sum() > 0):
            x = x * 2
        return self.layer(x)


def test_a_scripted_layer_has_no_python_that_could_keep_gradients() -> None:
    """Its class has no forward in Python: looking for one was an AttributeError of torch."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 4), torch.jit.script(Branches()), nn.Linear(4, 4)), torch.randn(4, 4)
    by_step(x, checkpoint="always")(model)
    stepped = [one.grad.clone() for one in model.parameters()]
    model.zero_grad()
    by_loop(x)(model)
    torch.testing.assert_close(stepped, [one.grad for one in model.parameters()])


def test_a_forward_that_was_assigned_to_a_layer_is_looked_at() -> None:
    layer = nn.Linear(4, 4)
    assert not names_retain_grad([layer])

    def forward(x: torch.Tensor) -> torch.Tensor:
        x.retain_grad()
        return x

    layer.forward = forward
    assert names_retain_grad([layer])
