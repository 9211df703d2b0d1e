"""Layers of the user's with backward hooks: kept whole, run once per micro-batch, and refused where they cannot be run."""

from __future__ import annotations

import copy
from collections.abc import Callable
from time import perf_counter
from typing import Any

import pytest
import torch
from torch import nn

import pipecompile as pc
from pipecompile.tracing.opaque.hooked_layers import hooked_layers


class Counted(nn.Module):
    """Depends on the number of its calls, and leaves a term for the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.calls, self.term = nn.Linear(4, 4), 0, torch.zeros(())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.inner(x) * (1 + 0.1 * (self.calls % 3))


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.GRU(4, 4, num_layers=2, dropout=0.5, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.rows(x.unsqueeze(1))[0].squeeze(1)


class Differentiated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + torch.func.grad(lambda y: y.pow(3).sum())(x)


def nothing(*_: Any) -> None: ...


GLOBAL = {
    "full": nn.modules.module.register_module_full_backward_hook,
    "before": nn.modules.module.register_module_full_backward_pre_hook,
}


@pytest.mark.parametrize("kind", GLOBAL)
def test_backward_hooks_of_all_modules_are_refused_before_and_after_the_first_step(kind: str) -> None:
    x, target = torch.randn(4, 4).double(), torch.randn(4, 4).double()
    pipe = pc.compile(net(Counted()), 2, loss_fn=nn.functional.mse_loss, n_microbatches=2, cost="analytic")
    for _ in range(2):
        handle = GLOBAL[kind](nothing)
        try:
            with pytest.raises(pc.TraceError, match="backward hooks of all modules") as raised:
                pipe.step(x, target=target)
        finally:
            handle.remove()
        assert "nothing" in str(raised.value)
        assert raised.value.code == "PC106"
        pipe.step(x, target=target)


def net(layer: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), layer, nn.Linear(4, 4)).double()


REGISTER: dict[str, Callable[[nn.Module], Any]] = {
    "full": lambda layer: layer.register_full_backward_hook(nothing),
    "before": lambda layer: layer.register_full_backward_pre_hook(nothing),
}


@pytest.mark.filterwarnings("ignore::pipecompile.RecordingWarning")
@pytest.mark.sampled(2)
@pytest.mark.parametrize("register", ["full", "before"])
@pytest.mark.parametrize("checkpoint", ["never", "always"])
@pytest.mark.parametrize("kind", [Counted, Dropping, Differentiated])
def test_a_step_is_that_of_the_loop(kind: type[nn.Module], checkpoint: str, register: str) -> None:
    torch.manual_seed(0)
    model = net(kind())
    eager = copy.deepcopy(model)
    for each in (model, eager):
        REGISTER[register](each[1])
    pipe = pc.compile(
        model,
        2,
        loss_fn=nn.functional.mse_loss,
        n_microbatches=4,
        cost="analytic",
        checkpoint=checkpoint,
        dispatch="inline",
    )
    x, y = torch.randn(2, 8, 4, dtype=torch.float64).unbind()
    for step in range(2):
        torch.manual_seed(step)
        loss = pipe.step(x, target=y).item()
        torch.manual_seed(step)
        expected = 0.0
        for part, target in zip(x.chunk(4), y.chunk(4), strict=True):
            share = nn.functional.mse_loss(eager(part), target) / 4
            share.backward()
            expected += share.item()
        assert loss == pytest.approx(expected, rel=1e-12)
    for own, twin in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(own.grad, twin.grad)
    assert getattr(model[1], "calls", 0) == getattr(eager[1], "calls", 0)


def test_the_outermost_layers_with_python_of_the_users_are_found() -> None:
    inside = nn.Sequential(Counted())
    model = nn.Sequential(nn.Linear(4, 4), inside, nn.Sequential(nn.Linear(4, 4)), Counted())
    for layer in (model[0], inside, inside[0], model[2]):
        layer.register_full_backward_hook(nothing)
    assert [reason.piece.path for reason in hooked_layers(model)] == ["1"]


class Timed(Counted):
    """Returns a number that is another in each run, so that no result can be predicted."""

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x), perf_counter()


class First(nn.Module):
    def forward(self, pair: Any) -> Any:
        return pair[0]


def test_a_layer_that_cannot_be_kept_whole_and_changes_state_is_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Timed(), First(), nn.Linear(4, 4)).double()
    model[1].register_full_backward_hook(nothing)
    with pytest.raises(pc.TraceError, match=r"Timed has backward hooks, and its forward changes .*calls"):
        pc.trace(model, torch.randn(4, 4).double())


def test_it_is_listed_as_hooked() -> None:
    model = net(Counted())
    model[1].register_full_backward_hook(nothing)
    assert [(one.name, one.kind) for one in pc.explain(model, torch.randn(4, 4).double()).kept_whole] == [
        ("1", "hooked")
    ]
