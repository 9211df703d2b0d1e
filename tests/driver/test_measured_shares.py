"""Shares measured on loss functions that no graph describes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import pipecompile as pc
from pipecompile.driver import measured_shares
from pipecompile.driver.measured_shares import MeasuredShares
from pipecompile.graph.batch_flow import BatchFlow
from pipecompile.graph.loss_outputs import LossOutputs
from pipecompile.graph.output_merging import join_rules
from pipecompile.ir import TARGET

LABELS = torch.tensor([0, 1, -100, -100, 2, -100, 3])
SIZES = (3, 3, 1)


def measured(loss_fn: Callable[..., Any], warn: Callable[[], None] = lambda: None) -> MeasuredShares:
    graph = pc.trace(nn.Linear(4, 5), torch.randn(7, 4))
    flow = BatchFlow(graph)
    outputs = LossOutputs.of(graph, join_rules(flow))
    return MeasuredShares(loss_fn, has_aux=False, outputs=outputs, device=torch.device("cpu"), warn=warn)


def targets(labels: torch.Tensor) -> tuple[Any, Any, Any]:
    return {TARGET: labels}, [{TARGET: part} for part in labels.split(SIZES)], SIZES


@pytest.mark.parametrize(
    ("loss_fn", "shares"),
    [
        (lambda y, t: F.cross_entropy(y[t >= 0], t[t >= 0]), [0.5, 0.25, 0.25]),
        (lambda y, t: F.cross_entropy(y, t, reduction="sum"), [1.0, 1.0, 1.0]),
        (lambda y, t: F.binary_cross_entropy(y, (t > 0).float()[:, None].expand_as(y)), [3 / 7, 3 / 7, 1 / 7]),
    ],
)
def test_shares_are_those_of_what_the_loss_counts(loss_fn: Callable[..., Any], shares: list[float]) -> None:
    one, call = measured(loss_fn), targets(LABELS)
    assert one.is_defined(*call)
    assert one.shares(*call)[0] == pytest.approx(shares, rel=1e-5)


@pytest.mark.parametrize(
    "loss_fn",
    [
        lambda y, t: F.cross_entropy(y, t) + y.square().mean(),
        lambda y, t: F.cross_entropy(y, t, reduction="none").max(),
        lambda y, t: F.cross_entropy(y, t).sqrt(),
        lambda y, t: y.no_such_method(t),
    ],
)
def test_a_loss_that_mixes_samples_has_no_shares(loss_fn: Callable[..., Any]) -> None:
    assert not measured(loss_fn).is_defined(*targets(LABELS))


def test_the_loss_function_is_left_as_it_was() -> None:
    class Counted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0
            self.register_buffer("centre", torch.zeros(5))

        def forward(self, y: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            self.centre += y.detach().mean(0)  # type: ignore[operator]
            torch.rand(1)
            return F.cross_entropy(y[t >= 0], t[t >= 0])

    loss_fn = Counted()
    one, state = measured(loss_fn), torch.get_rng_state()
    assert one.is_defined(*targets(LABELS))
    assert (loss_fn.calls, float(loss_fn.centre.abs().sum())) == (0, 0.0)  # type: ignore[operator]
    assert torch.equal(state, torch.get_rng_state())


def test_a_later_target_without_shares_is_told() -> None:
    told = []
    one = measured(lambda y, t: F.cross_entropy(y, t) + (t[0] > 3) * y.square().mean(), lambda: told.append(1))
    assert one.is_defined(*targets(LABELS))
    weights, _ = one.shares(*targets(LABELS.where(LABELS != 0, 4)))
    assert (told, weights) == ([1], [3 / 7, 3 / 7, 1 / 7])


def test_labels_that_are_all_ignored_are_no_number_as_in_eager() -> None:
    weights, _ = measured(F.cross_entropy).shares(*targets(torch.full((7,), -100)))
    assert all(map(math.isnan, weights))


class Counted(nn.Module):
    """A loss with a counter, which Python reads."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, y: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return F.cross_entropy(y[t >= 0], t[t >= 0]) * self.calls


def test_each_call_of_a_loss_with_a_counter_begins_in_the_same_state() -> None:
    """A counter that went on from call to call gave shares of 1/2, 1/3, 1/4 ... of the right ones, without a warning."""
    loss_fn, call = Counted(), targets(LABELS)
    one = measured(loss_fn)
    assert one.is_defined(*call)
    assert one.shares(*call)[0] == pytest.approx([0.5, 0.25, 0.25], rel=1e-5)
    assert loss_fn.calls == 0


@pytest.mark.parametrize(("loss_fn", "searches"), [(F.cross_entropy, 1), (Counted(), 4)], ids=["pure", "counted"])
def test_state_is_looked_for_once_where_no_call_changes_any(
    loss_fn: Callable[..., Any], searches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    call, one, found = targets(LABELS), measured(loss_fn), list[object]()
    one.shares(*call)
    undone = measured_shares.loss_undone
    monkeypatch.setattr(measured_shares, "loss_undone", lambda *args: found.append(args) or undone(*args))
    shares, _ = one.shares(*call)
    assert len(found) == searches
    assert shares == pytest.approx(measured(loss_fn).shares(*call)[0])
