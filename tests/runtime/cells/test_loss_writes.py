"""Losses that write their own tensors: each backward finds what the loss of its own micro-batch has left."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import pipecompile as pc
from pipecompile.runtime.cells.loss_writes import LossWrites, copying_forward
from pipecompile.runtime.cells.saved_state import _Saved
from pipecompile.torch_private.hidden_values import hidden
from tests.support.eager import accumulate, assert_same


class Prototypes(nn.Module):
    """A loss with a weight that it changes through `.data`, in place or not, or with a new version."""

    def __init__(self, change: Callable[[nn.Parameter], Any]) -> None:
        super().__init__()
        self.change, self.weight = change, nn.Parameter(torch.eye(4).double() + 0.1)

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        self.change(self.weight)
        return functional.mse_loss(output @ self.weight, target)


def _with_version(weight: nn.Parameter) -> None:
    with torch.no_grad():
        weight.mul_(0.9)


def _through_data(weight: nn.Parameter) -> None:
    weight.data.mul_(0.9)


def _with_other_memory(weight: nn.Parameter) -> None:
    weight.data = weight.data * 0.9


def _network() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)).double()


@pytest.mark.parametrize("checkpoint", ["never", "except_last"])
@pytest.mark.parametrize("change", [_with_version, _through_data, _with_other_memory])
def test_a_backward_finds_what_its_own_loss_has_left(change: Callable[[nn.Parameter], Any], checkpoint: str) -> None:
    torch.manual_seed(0)
    model, loss_fn, x, target = (
        _network(),
        Prototypes(change),
        torch.randn(8, 8).double(),
        torch.randn(8, 4).double(),
    )
    reference, own_loss = copy.deepcopy(model), copy.deepcopy(loss_fn)
    pipe = pc.compile(
        model, 2, example_args=(x,), n_microbatches=4, loss_fn=loss_fn, cost="analytic", devices=["cpu"] * 2,
        schedule="gpipe", checkpoint=checkpoint,
    )  # fmt: skip
    for _ in range(2):
        expected = accumulate(reference, x, 4, loss_fn=own_loss, target=target).item()
        assert pipe.step(x, target=target) == pytest.approx(expected, rel=1e-12)
        assert_same(model, reference, 1e-12)
        assert_same(loss_fn, own_loss, 1e-12)
        assert torch.equal(loss_fn.weight, own_loss.weight)


def test_the_first_call_finds_what_is_written() -> None:
    loss_fn = Prototypes(_through_data)
    loss_fn.other = nn.Parameter(torch.ones(2))
    writes = LossWrites(loss_fn)
    assert {*map(id, writes.near())} == {id(loss_fn.weight), id(loss_fn.other)}
    writes.watched(loss_fn)(torch.ones(1, 4).double(), torch.ones(1, 4).double())
    assert writes.written is not None
    assert [*map(id, writes.written)] == [id(loss_fn.weight)]


class Perceptual(nn.Module):
    """A loss with a network of its own, which it does not write; with `is_clamped`, with a weight that it writes."""

    def __init__(self, *, is_clamped: bool) -> None:
        super().__init__()
        self.features, self.is_clamped = nn.Linear(4, 4).requires_grad_(False), is_clamped
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if self.is_clamped:
            self.scale.data.clamp_(0, 1)
        return (self.features(output) * self.scale - target).square().mean()


@pytest.mark.parametrize("is_clamped", [False, True])
def test_a_forward_copies_only_what_the_loss_writes(is_clamped: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first forward copied all that is near the loss: the weights of its network. A later call may clamp the scale."""
    sizes = list[int]()
    copy_of = _Saved.copy
    monkeypatch.setattr(_Saved, "copy", lambda saved: (sizes.append(saved.tensor.numel()), copy_of(saved)))
    x, target = torch.randn(8, 8), torch.randn(8, 4)
    loss_fn = Perceptual(is_clamped=is_clamped)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    pipe = pc.compile(model, 2, example_args=(x,), n_microbatches=4, loss_fn=loss_fn, cost="analytic")
    for _ in range(2):
        pipe.step(x, target=target)
    assert sizes == [4] * 8


def test_a_warm_forward_calls_nothing_for_a_loss_that_writes_nothing() -> None:
    """Each F of the last stage entered two contexts, for nothing."""
    writes, names = LossWrites(functional.mse_loss), list[str]()
    writes.written = []
    forward = copying_forward(lambda _: None, (), writes)
    sys.setprofile(lambda frame, event, _: names.append(frame.f_code.co_name) if event == "call" else None)
    try:
        forward(None)  # type: ignore[arg-type]
    finally:
        sys.setprofile(None)
    assert names == ["forward", "<lambda>"]


def test_weights_whose_values_are_elsewhere_are_not_copied() -> None:
    here, elsewhere = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    writes = LossWrites(lambda output: (output * here).sum() + elsewhere.numel())
    with hidden([elsewhere], lambda _: RuntimeError("read")):
        assert [one for one in writes.near() if one is elsewhere] == []
    assert {id(one) for one in writes.near()} == {id(here), id(elsewhere)}


class WritesLater(nn.Module):
    """A loss whose first calls write nothing."""

    def __init__(self, change: Callable[[nn.Parameter], Any]) -> None:
        super().__init__()
        self.change, self.calls, self.weight = change, 0, nn.Parameter(torch.eye(4).double() + 0.1)

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls > 4:
            self.change(self.weight)
        return functional.mse_loss(output @ self.weight, target)


@pytest.mark.parametrize("change", [_with_version, _through_data, _with_other_memory])
def test_a_backward_finds_what_a_later_call_of_its_loss_has_left(change: Callable[[nn.Parameter], Any]) -> None:
    """Through `.data` the gradients were others, without a word; with a new version a step ended in a RunError."""
    torch.manual_seed(0)
    model, loss_fn, x = _network(), WritesLater(change), torch.randn(8, 8).double()
    reference, own_loss, target = copy.deepcopy(model), copy.deepcopy(loss_fn), torch.randn(8, 4).double()
    pipe = pc.compile(
        model, 2, n_microbatches=4, loss_fn=loss_fn, cost="analytic", devices=["cpu"] * 2, schedule="gpipe"
    )
    for _ in range(2):
        expected = accumulate(reference, x, 4, loss_fn=own_loss, target=target).item()
        assert pipe.step(x, target=target) == pytest.approx(expected, rel=1e-12)
        assert_same(model, reference, 1e-12)
        assert_same(loss_fn, own_loss, 1e-12)
