"""Losses of the model that a loss function chooses are divided by what they count."""

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

LABELS = torch.tensor([[1, 2, 0], [-100, 2, -100], [-100, -100, 4], [0, -100, -100]])


def tokens(y: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(y.flatten(0, 1), labels.flatten())


class Chosen(nn.Module):
    """A model with losses of its own; with `meets`, samples meet before them."""

    def __init__(self, *, meets: bool) -> None:
        super().__init__()
        self.a, self.b, self.meets = nn.Linear(4, 8), nn.Linear(8, 5), meets

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        y = self.b(self.a(x).tanh())
        y = y - y.mean(0) if self.meets else y
        penalty = self.b.weight.square().sum()
        return {
            "loss": tokens(y, labels),
            "aux": tokens(-y, labels),
            "penalty": penalty,
            "mean": y.square().mean(),
            "y": y,
        }


CHOICES: dict[str, Callable[[Any], torch.Tensor]] = {
    "the loss": lambda o: o["loss"],
    "scaled": lambda o: 2 * o["loss"],
    "a sum": lambda o: o["loss"] + 0.3 * o["aux"] + o["penalty"],
    "a plain mean": lambda o: o["mean"],
    "a penalty": lambda o: o["penalty"],
}


def step_of(model: nn.Module, loss_fn: Any, weights: list[float], **options: Any) -> list[warnings.WarningMessage]:
    """Run a step on two micro-batches, compare it with a loop over these with `weights`, and return the warnings."""
    eager, x = copy.deepcopy(model), torch.randn(4, 3, 4)
    parts = [(x[:2], LABELS[:2]), (x[2:], LABELS[2:4])]
    losses = [loss_fn(eager(*part)) * weight for part, weight in zip(parts, weights, strict=True)]
    sum(losses).backward()  # type: ignore[union-attr]
    pipe = pc.compile(
        model, 2, cost="analytic", devices=["cpu"] * 2, n_microbatches=2, loss_fn=loss_fn,
        example_args=(x, LABELS), **options,
    )  # fmt: skip
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loss = pipe.step(x, labels=LABELS)
    torch.testing.assert_close(loss, sum(losses), check_dtype=False)
    for mine, theirs in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=1e-6)
    return caught


@pytest.mark.parametrize("meets", [False, True])
@pytest.mark.parametrize("name", CHOICES)
def test_a_loss_that_the_model_has_computed_is_divided_by_what_it_counts(name: str, meets: bool) -> None:
    torch.manual_seed(0)
    options = {"across_batch": "each"} if meets else {}
    weights = [0.5, 0.5] if name in ("a plain mean", "a penalty") else [4 / 6, 2 / 6]
    caught = step_of(Chosen(meets=meets), CHOICES[name], weights, **options)
    is_unknown = meets and name == "a plain mean"
    assert [one for one in caught if "not recognised" in str(one.message)] == caught[: int(is_unknown)]


def test_a_sum_of_losses_that_count_differently_is_told() -> None:
    caught = step_of(Chosen(meets=False), lambda o: o["loss"] + o["mean"], [0.5, 0.5])
    assert ["not recognised" in str(one.message) for one in caught] == [True]


@pytest.mark.parametrize(("across_batch", "count"), [(None, 1), ("each", 0)])
def test_samples_that_meet_before_a_loss_that_counts_are_told_and_what_counts_stays(
    across_batch: Any, count: int
) -> None:
    model = Chosen(meets=True)
    caught = step_of(model, lambda o: o["aux"], [4 / 6, 2 / 6], across_batch=across_batch)
    assert ["samples of a batch meet" in str(one.message) for one in caught] == [True] * count
