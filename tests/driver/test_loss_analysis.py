"""A loss that changes between steps, or gets targets of another kind, is analysed again: its divisor is never an earlier one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import pipecompile as pc
from pipecompile.driver import loss_recording
from pipecompile.driver.measured_shares import MeasuredShares

Loss = Callable[..., torch.Tensor]


def body() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5)).double()


def pipe_of(model: nn.Module, loss_fn: Loss) -> pc.Pipeline:
    return pc.compile(model, 2, loss_fn=loss_fn, n_microbatches=3, devices=["cpu"] * 2, cost="analytic")


def labels() -> torch.Tensor:
    return torch.tensor([0, 0, 1, 0, 2, 3, 4, 1, 2])


def assert_equal_to_eager(loss_fn: Loss, change: Callable[[int], None], targets: Callable[[int], Any]) -> pc.Pipeline:
    """Compare four steps with eager's; `change` runs before each."""
    model = body()
    eager, pipe = copy.deepcopy(model), pipe_of(model, loss_fn)
    for step in range(4):
        change(step)
        x, target = torch.randn(9, 6, dtype=torch.float64), targets(step)
        loss = loss_fn(eager(x), target)
        loss.backward()
        torch.testing.assert_close(pipe.step(x, target=target), loss.detach(), rtol=1e-12, atol=1e-14)
        for own, other in zip(model.parameters(), eager.parameters(), strict=True):
            torch.testing.assert_close(own.grad, other.grad, rtol=1e-10, atol=1e-14)
    return pipe


def analysis_of(pipe: pc.Pipeline) -> Any:
    return next(iter(pipe._cache.latest.losses.values()))


@pytest.mark.parametrize(
    "values",
    [{"ignore_index": 0}, {"ignore_index": 1}, {"weight": torch.tensor([1.0, 2, 3, 4, 5], dtype=torch.float64)}],
    ids=["ignored", "another ignored", "weight"],
)
@pytest.mark.parametrize("begin", [{}, {"ignore_index": 2}], ids=["plain", "ignoring"])
def test_attributes_of_a_criterion_may_change(begin: dict[str, Any], values: dict[str, Any]) -> None:
    criterion = nn.CrossEntropyLoss(**begin)

    def change(step: int) -> None:
        for name, value in values.items() if step == 2 else ():
            setattr(criterion, name, value)

    assert_equal_to_eager(criterion, change, lambda _: labels())


def test_what_a_loss_function_closes_over_may_change() -> None:
    state: dict[str, Any] = {"ignored": 0, "masked": False}

    def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if state["masked"]:
            mask = (target >= state["ignored"]).double()
            return (F.cross_entropy(output, target, reduction="none") * mask).sum() / mask.sum()
        return F.cross_entropy(output, target, ignore_index=state["ignored"])

    changes: list[dict[str, Any]] = [{}, {"ignored": 1}, {"masked": True}, {"ignored": 2}]
    assert_equal_to_eager(loss_fn, lambda step: state.update(changes[step]), lambda _: labels())


def test_targets_of_another_kind_are_another_loss() -> None:
    weight = torch.tensor([1.0, 2, 3, 4, 5], dtype=torch.float64)

    def loss_fn(output: torch.Tensor, target: Any) -> torch.Tensor:
        if isinstance(target, dict):
            return F.cross_entropy(output, target["labels"], ignore_index=target["ignored"])
        return F.cross_entropy(output, target, weight=weight)

    kinds = [labels(), F.one_hot(labels(), 5).double(), {"labels": labels(), "ignored": 0}, {"labels": labels(), "ignored": 1}]  # fmt: skip
    assert_equal_to_eager(loss_fn, lambda _: None, lambda step: kinds[step])


def test_a_loss_that_changes_in_every_step_is_measured_instead_of_recorded() -> None:
    criterion = nn.CrossEntropyLoss(ignore_index=0, label_smoothing=0.0)
    model = body()
    eager, pipe = copy.deepcopy(model), pipe_of(model, criterion)
    with patch.object(loss_recording, "record", wraps=loss_recording.record) as recorded:
        for step in range(7):
            criterion.label_smoothing = 0.05 * step
            x = torch.randn(9, 6, dtype=torch.float64)
            loss = criterion(eager(x), labels())
            torch.testing.assert_close(pipe.step(x, target=labels()), loss.detach(), rtol=1e-6, atol=0)
    assert recorded.call_count == 4
    assert isinstance(analysis_of(pipe).divisor, MeasuredShares)


def test_a_loss_that_does_not_change_is_analysed_once() -> None:
    model = body()
    pipe = pipe_of(model, nn.CrossEntropyLoss(ignore_index=0))
    with patch.object(loss_recording, "record", wraps=loss_recording.record) as recorded:
        for _ in range(3):
            pipe.step(torch.randn(9, 6, dtype=torch.float64), target=labels())
    assert recorded.call_count == 1


def test_losses_of_lists_may_change() -> None:
    criterion, model = nn.CrossEntropyLoss(ignore_index=0), body()
    eager, pipe = copy.deepcopy(model), pipe_of(model, criterion)
    x = torch.randn(9, 6, dtype=torch.float64)
    for ignored in (0, 1):
        criterion.ignore_index = ignored
        loss = pipe.step(microbatches=[(x[:4], labels()[:4]), (x[4:], labels()[4:])])
        torch.testing.assert_close(loss, criterion(eager(x), labels()).detach(), rtol=1e-12, atol=0)
