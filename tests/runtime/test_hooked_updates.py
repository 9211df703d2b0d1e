"""An optimizer in the backward: exact where a schedule is a loop, warned of or refused where micro-batches are in flight."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward

import pipecompile as pc
from pipecompile.runtime.hooked_updates import is_loop
from tests.support.eager import accumulate


def _descend(parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    parameter.data.add_(parameter.grad, alpha=-0.5)
    parameter.grad = None


@torch.no_grad()
def _add(parameter: torch.Tensor) -> None:
    parameter.add_(1.0)


def _models(schedule: str, n_microbatches: int, n_stages: int = 2) -> tuple[pc.Pipeline, nn.Module]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    eager = copy.deepcopy(model)
    for own in (*model.parameters(), *eager.parameters()):
        own.register_post_accumulate_grad_hook(_descend)
    pipe = pc.compile(
        model,
        n_stages,
        devices=["cpu"] * n_stages,
        n_microbatches=n_microbatches,
        schedule=schedule,
        loss_fn=lambda y: y.square().mean(),
        cost="analytic",
        check=False,
    )
    return pipe, eager


def test_an_update_while_micro_batches_are_in_flight_is_warned_of() -> None:
    """The step silently used old values of the first stage's parameters."""
    pipe, _ = _models("1f1b", 2)
    with pytest.warns(pc.RecordingWarning, match="hooks on gradients change parameters"):
        pipe.step(torch.randn(4, 4))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pipe.step(torch.randn(4, 4))  # once per program
    assert not is_loop(pipe.program)


@pytest.mark.parametrize(("n_microbatches", "n_stages"), [(1, 2), (2, 1)])
def test_an_update_where_the_schedule_is_a_loop_is_exact(n_microbatches: int, n_stages: int) -> None:
    pipe, eager = _models("1f1b", n_microbatches, n_stages)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for x in torch.randn(3, 4, 4):
            assert torch.equal(pipe.step(x), accumulate(eager, x, n_microbatches, lambda y: y.square().mean()))
    assert is_loop(pipe.program)
    assert all(torch.equal(a, b) for a, b in zip(pipe.model.parameters(), eager.parameters(), strict=True))


def test_a_saved_parameter_that_was_updated_is_refused_with_the_reason() -> None:
    pipe, _ = _models("gpipe", 2)
    for own in pipe.model.parameters():
        own.register_post_accumulate_grad_hook(_add)
    with pytest.raises(pc.RunError, match="n_microbatches=1") as told:
        pipe.step(torch.randn(4, 4))
    assert "hooks on gradients change parameters" in told.value.why


def test_an_optimizer_on_the_nodes_that_add_to_gradients_is_warned_of() -> None:
    """As `_apply_optimizer_in_backward` registers it. It updated while micro-batches were in flight, silently."""
    pipe, _ = _models("1f1b", 2)
    for own in pipe.model.parameters():
        own._post_accumulate_grad_hooks.clear()  # type: ignore[attr-defined]
    _apply_optimizer_in_backward(torch.optim.SGD, pipe.model.parameters(), {"lr": 0.1})  # type: ignore[no-untyped-call]
    with pytest.warns(pc.RecordingWarning, match="hooks on gradients change parameters"):
        pipe.step(torch.randn(4, 4))


class Adds(torch.autograd.Function):
    """Adds to a tensor in its backward."""

    @staticmethod
    def forward(ctx, h, state):
        ctx.state = state
        return h * 1.0

    @staticmethod
    def backward(ctx, gradient):
        ctx.state.add_(gradient.abs().mean())
        return gradient, None


class Adaptive(nn.Module):
    """The forward adds a number that hooks or a backward write."""

    def __init__(self, writer: str) -> None:
        super().__init__()
        self.inner, self.outer, self.writer = nn.Linear(4, 4), nn.Linear(4, 4), writer
        self.register_buffer("scale", torch.ones(()))
        if writer == "weight":
            self.inner.weight.register_hook(self.note)
        if writer == "layer":
            self.inner.register_full_backward_hook(lambda _layer, _of_inputs, of_outputs: self.note(of_outputs[0]))

    def note(self, gradient: torch.Tensor) -> None:
        self.scale.add_(gradient.abs().mean())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.inner(x)
        if self.writer == "function":
            h = Adds.apply(h, self.scale)
        if self.writer == "tensor" and h.requires_grad:
            h.register_hook(self.note)
        return self.outer(h + self.scale)


@pytest.mark.parametrize("writer", ["weight", "layer", "function", "tensor"])
def test_state_that_is_written_while_micro_batches_are_in_flight_is_warned_of(writer: str) -> None:
    """Forwards of the first stage silently read what a loop would have written before."""
    model, loss = Adaptive(writer), lambda y: y.square().mean()
    pipe = pc.compile(model, 2, n_microbatches=2, schedule="1f1b", loss_fn=loss, cost="analytic", check=False)
    with pytest.warns(pc.RecordingWarning, match="scale, which the forward reads, was written during the step"):
        pipe.step(torch.randn(4, 4))
    with warnings.catch_warnings():
        warnings.simplefilter("error", pc.RecordingWarning)
        pipe.step(torch.randn(4, 4))  # once per program


def test_state_that_only_the_loop_after_the_step_reads_is_not_warned_of() -> None:
    model = Adaptive("none")
    total = torch.zeros(())
    model.inner.weight.register_hook(lambda gradient: total.add_(gradient.abs().mean()) and None)
    pipe = pc.compile(model, 2, n_microbatches=2, schedule="1f1b", loss_fn=lambda y: y.square().mean(), cost="analytic")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pipe.step(torch.randn(4, 4))
    assert total > 0


def test_copies_of_a_stage_have_micro_batches_in_flight_beside_each_other() -> None:
    """Each row is a loop of its own, and the second copy ran its forward on the old values, silently."""
    pipe, _ = _models("chimera", 2)
    with pytest.warns(pc.RecordingWarning, match="hooks on gradients change parameters"):
        pipe.step(torch.randn(4, 4))
    assert pipe.program.directions
    assert not is_loop(pipe.program)
