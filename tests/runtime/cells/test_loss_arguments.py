"""A loss may write into its target and into outputs of earlier stages, and ask where they come from, as in eager."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import pipecompile as pc
from pipecompile.runtime.cells.loss_arguments import received, unwritten


class Heads(nn.Module):
    """Gives what its first layer has made, a view of it, and scores."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> Any:
        features = self.first(x)
        scores = self.third(self.second(features + 1).tanh())
        return features, scores, x


def squared(output: Any, target: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(output[1], target) + (output[0] * output[2]).mean()


def labels_written(output: Any, target: torch.Tensor) -> torch.Tensor:
    target -= 1
    return squared(output, target)


def labels_written_past_autograd(output: Any, target: torch.Tensor) -> torch.Tensor:
    target.numpy()[:, 0] += 1
    return squared(output, target)


def features_written(output: Any, target: torch.Tensor) -> torch.Tensor:
    output[0].masked_fill_(output[0] > 0.5, 0.1)
    return F.mse_loss(output[1], target) + output[0].square().mean()


def origin_asked(output: Any, target: torch.Tensor) -> torch.Tensor:
    factor = 1 if output[0].is_leaf or output[0].grad_fn is None else 3
    return squared((output[0] * factor, *output[1:]), target)


LOSSES = [labels_written, labels_written_past_autograd, features_written, origin_asked]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("options", [{}, {"checkpoint": "always"}, {"schedule": "zb-h1"}], ids=str)
def test_a_loss_writes_into_what_it_gets(loss: Callable[..., torch.Tensor], options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model, x, y = Heads(), torch.randn(4, 4), torch.randn(4, 4)
    eager, own_y = copy.deepcopy(model), y.clone()
    pipe = pc.compile(model, 3, n_microbatches=2, loss_fn=loss, cost="analytic", devices=["cpu"] * 3, **options)
    for _ in range(2):
        total = pipe.step(x, target=y)
        expected = torch.zeros(())
        for a, b in zip(x.chunk(2), own_y.chunk(2), strict=True):
            own = loss(eager(a), b) / 2
            own.backward()
            expected += own.detach()
        torch.testing.assert_close(total, expected)
    assert torch.equal(y, own_y)
    for one, other in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


class Half(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, :2]


class Viewed(nn.Module):
    """Gives what its first layer has made, and a view of it from another stage."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.part, self.second, self.third = nn.Linear(4, 4), Half(), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> Any:
        features = self.first(x)
        return features, self.part(features), self.third(self.second(features + 1))


def all_written(output: Any) -> torch.Tensor:
    output[0].add_(1)
    return output[0].square().mean() + output[1].square().mean() + output[2].square().mean()


def test_a_write_that_an_output_of_another_stage_shares_is_refused() -> None:
    pin = {"first": 0, "part": 1, "second": 1, "third": 2}
    pipe = pc.compile(Viewed(), 3, n_microbatches=2, loss_fn=all_written, cost="analytic", devices=["cpu"] * 3, pin=pin)
    with pytest.raises(pc.PipecompileError, match="shares memory with another one"):
        pipe.step(torch.randn(4, 4))


def test_a_write_that_an_output_of_the_last_stage_shares_has_its_gradient() -> None:
    model, x = Viewed(), torch.randn(4, 4)
    eager, pin = copy.deepcopy(model), {"first": 0, "second": 0, "part": 1, "third": 1}
    pipe = pc.compile(model, 2, n_microbatches=2, loss_fn=all_written, cost="analytic", devices=["cpu"] * 2, pin=pin)
    pipe.step(x)
    for part in x.chunk(2):
        (all_written(eager(part)) / 2).backward()
    torch.testing.assert_close(model.first.weight.grad, eager.first.weight.grad)


def test_a_measured_loss_may_write_into_scores() -> None:
    def loss(scores: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        scores.div_(2)
        return F.cross_entropy(scores[target != 3], target[target != 3])

    model, y = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.tensor([3, 1, 3, 2, 0, 1])
    x, eager = torch.randn(6, 4), copy.deepcopy(model)
    pipe = pc.compile(model, 2, n_microbatches=3, loss_fn=loss, cost="analytic", devices=["cpu"] * 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error", pc.RecordingWarning)
        total = pipe.step(x, target=y)
    torch.testing.assert_close(total, loss(eager(x), y).detach())


def test_what_a_loss_left_alone_is_not_kept() -> None:
    one, other = torch.tensor([1.0, 2.0]), {"labels": torch.tensor([1, 2])}
    copies = {0: one.clone(), 1: {"labels": torch.tensor([1, 2])}, 2: torch.zeros(2)}
    assert unwritten(copies, [one, other, torch.ones(2)], (0, 1, 2)) == [0, 1]


def test_a_received_output_is_no_leaf_and_no_view() -> None:
    leaf = torch.ones(2, requires_grad=True)
    value = received(leaf)
    value.mul_(2)
    value.sum().backward()
    assert value.grad_fn is not None
    assert torch.equal(leaf, torch.full((2,), 2.0))
    torch.testing.assert_close(leaf.grad, torch.full((2,), 2.0))
    assert received(3) == 3


def popped(output: Any, target: dict[str, Any]) -> torch.Tensor:
    return F.mse_loss(output[1], target.pop("y")) + output[0].square().mean()


def another_item(output: Any, target: dict[str, Any]) -> torch.Tensor:
    wanted, target["y"] = target["y"], 3
    return F.mse_loss(output[1], wanted) + output[0].square().mean()


def counted(output: Any, target: dict[str, Any]) -> torch.Tensor:
    target["power"] += 1
    return F.mse_loss(output[1], target["y"]) * target["power"]


@pytest.mark.parametrize("loss", [popped, another_item, counted])
@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_a_loss_changes_the_items_of_its_target(loss: Callable[..., torch.Tensor], checkpoint: Any) -> None:
    torch.manual_seed(0)
    model, x, y = Heads(), torch.randn(4, 4), torch.randn(4, 4)
    eager = copy.deepcopy(model)
    pipe = pc.compile(
        model, 3, n_microbatches=2, loss_fn=loss, cost="analytic", devices=["cpu"] * 3, checkpoint=checkpoint
    )
    for _ in range(2):
        total = pipe.step(x, target={"y": y, "power": 1})
        for a, b in zip(x.chunk(2), y.chunk(2), strict=True):
            (loss(eager(a), {"y": b, "power": 1}) / 2).backward()
    assert total.isfinite()
    for one, other in zip(model.parameters(), eager.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None)
        if other.grad is not None:
            torch.testing.assert_close(one.grad, other.grad)


class Labels:
    def __init__(self, y: torch.Tensor) -> None:
        self.y, self.power = y, 1


@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_a_loss_changes_the_attributes_of_its_target(checkpoint: Any) -> None:
    def loss(output: Any, target: Labels) -> torch.Tensor:
        target.power *= 2
        return F.mse_loss(output[1], target.y) * target.power

    torch.manual_seed(0)
    model, x, y = Heads(), torch.randn(4, 4), torch.randn(4, 4)
    eager = copy.deepcopy(model)
    pipe = pc.compile(
        model, 3, n_microbatches=2, loss_fn=loss, cost="analytic", devices=["cpu"] * 3, checkpoint=checkpoint
    )
    pipe.step(x, target=Labels(y))
    for a, b in zip(x.chunk(2), y.chunk(2), strict=True):
        (loss(eager(a), Labels(b)) / 2).backward()
    torch.testing.assert_close(model.second.weight.grad, eager.second.weight.grad)
