"""A buffer that a forward replaces is a new tensor after each call, and tensors that the user holds keep their values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import pipecompile as pc

M = 2
"""Micro-batches of a step, of two samples each."""


class Recurrent(nn.Module):
    """A layer that carries its state from call to call, detached, as in truncated backpropagation through time."""

    state: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.into, self.cell, self.out = nn.Linear(3, 4), nn.Linear(8, 4), nn.Linear(4, 2)
        self.register_buffer("state", torch.zeros(2, 4))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.cell(torch.cat([self.into(x), self.state], 1)))
        self.state = h.detach()
        return self.out(h)


class KeptWhole(Recurrent):
    """The same with a piece that no graph contains."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.scaled(x))

    def scaled(self, x: Tensor) -> Tensor:
        return x * 2 if float(x.sum()) > 0 else x


def batch(seed: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(seed)
    return torch.randn(4, 3), torch.randn(4, 2)


def eager_step(model: nn.Module) -> Callable[..., Tensor]:
    def step(x: Tensor, target: Tensor) -> Tensor:
        losses = [mse_loss(model(part), y) / M for part, y in zip(x.chunk(M), target.chunk(M), strict=True)]
        for loss in losses:
            loss.backward()
        return torch.stack(losses).sum().detach()

    return step


def compiled(model: nn.Module, **options: Any) -> pc.Pipeline:
    devices = ["cpu"] * 2
    return pc.compile(model, 2, example_args=batch(0)[:1], n_microbatches=M, loss_fn=mse_loss, devices=devices, cost="analytic", **options)  # fmt: skip


def pair(kind: type[Recurrent]) -> tuple[Recurrent, Recurrent]:
    torch.manual_seed(0)
    model, twin = kind(), kind()
    twin.load_state_dict(model.state_dict())
    return model, twin


def epochs(model: Recurrent, step: Callable[..., Tensor]) -> tuple[list[Tensor], Tensor]:
    """Return the losses of three epochs that all begin with one tensor as their state, and this tensor."""
    start, losses = torch.full((2, 4), 0.5), []
    for _ in range(3):
        model.state = start
        losses += [step(x, target=target) for x, target in map(batch, range(2))]
    return losses, start


@pytest.mark.parametrize("kind", [Recurrent, KeptWhole])
@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_a_tensor_that_was_assigned_keeps_its_values(kind: type[Recurrent], checkpoint: str) -> None:
    """The graph wrote the user's tensor: every epoch but the first began with another state, silently."""
    model, twin = pair(kind)
    pipe = compiled(model, checkpoint=checkpoint)
    made, start = epochs(model, pipe.step)
    wanted, _ = epochs(twin, eager_step(twin))
    assert torch.equal(torch.stack(made), torch.stack(wanted))
    assert torch.equal(start, torch.full((2, 4), 0.5))
    assert torch.equal(model.state, twin.state)
    for parameter, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, other.grad)


def test_a_new_tensor_needs_no_new_recording() -> None:
    model, _ = pair(Recurrent)
    pipe = compiled(model)
    epochs(model, pipe.step)
    model.state = torch.ones(2, 4)
    pipe.step(*batch(3)[:1], target=batch(3)[1])
    assert pipe.explain().traces == 1


def states(model: Recurrent, step: Callable[..., Tensor]) -> list[Tensor]:
    """Return the state after each of three steps, as a user keeps it."""
    kept = [model.state]
    for x, target in map(batch, range(3)):
        step(x, target=target)
        kept.append(model.state)
    return kept


def test_states_that_the_user_keeps_are_those_of_their_steps() -> None:
    """All of them were one tensor."""
    model, twin = pair(Recurrent)
    made, wanted = states(model, compiled(model).step), states(twin, eager_step(twin))
    assert [torch.equal(*both) for both in zip(made, wanted, strict=True)] == [True] * 4


def test_what_is_written_into_the_buffer_between_calls_is_read() -> None:
    model, twin = pair(Recurrent)
    pipe, step = compiled(model), eager_step(twin)
    for one in (model, twin):
        one.state.fill_(0.3)  # after `compile`, before the first step
    for seed in range(3):
        x, target = batch(seed)
        assert torch.equal(pipe.step(x, target=target), step(x, target=target))
        for one in (model, twin):
            one.state.mul_(0.5)
    model.load_state_dict(twin.state_dict())
    x, _ = batch(4)
    out = pipe(x)
    out.square().sum().backward()
    assert torch.equal(out, torch.cat([twin(part) for part in x.chunk(M)]))
    assert torch.equal(model.state, twin.state)


@pytest.mark.parametrize("kind", [Recurrent, KeptWhole])
def test_a_backward_that_runs_forwards_again_reads_the_state_of_its_forward(kind: type[Recurrent]) -> None:
    model, twin = pair(kind)
    pipe = compiled(model, checkpoint="always")
    for seed in range(2):
        x, target = batch(seed)
        (pipe(x) - target).square().mean().backward()
        (torch.cat([twin(part) for part in x.chunk(M)]) - target).square().mean().backward()
        assert torch.equal(model.state, twin.state)
    for parameter, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, other.grad)


def test_a_buffer_of_two_modules_is_replaced_in_one() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.out = Recurrent(), Recurrent(), nn.Linear(2, 2)
            self.second.state = self.first.state

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.first(x)) + self.second.out(self.second.state)

    torch.manual_seed(0)
    model, twin = Pair(), Pair()
    twin.load_state_dict(model.state_dict())
    pipe, step = compiled(model), eager_step(twin)
    for seed in range(2):
        x, target = batch(seed)
        torch.testing.assert_close(pipe.step(x, target=target), step(x, target=target), rtol=0, atol=0)
    assert torch.equal(model.second.state, twin.second.state)


def test_after_an_error_the_state_is_the_models_own() -> None:
    model, _ = pair(Recurrent)
    pipe = compiled(model)
    pipe.step(*batch(0)[:1], target=batch(0)[1])
    with pytest.raises(pc.PipecompileError):
        pipe.step(torch.randn(4, 5), target=torch.randn(4, 2))
    before = model.state
    values = before.clone()
    pipe.step(*batch(1)[:1], target=batch(1)[1])
    assert torch.equal(before, values)
