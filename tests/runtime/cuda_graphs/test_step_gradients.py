"""Gradients of a step end up in `.grad` as in eager, wherever `.grad` was, and what a user kept stays."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from pipecompile.runtime.cuda_graphs.step_gradients import StepGradients


class Steps:
    """Two weights whose graph writes or adds 1 and 2."""

    def __init__(self) -> None:
        self.weights, self.sums, self.ran = (
            [nn.Parameter(torch.zeros(3)) for _ in range(2)],
            StepGradients(),
            list[bool](),
        )

    def run(self) -> list[torch.Tensor | None]:
        self.ran.append(self.sums.replay(self.weights, self.replay_of))
        return [weight.grad for weight in self.weights]

    def replay_of(self, adds: bool) -> Callable[[], None]:
        def replay() -> None:
            for value, weight in enumerate(self.weights, 1):
                total = self.sums.sum_of(weight)
                total.copy_(total * adds + value)

        return replay


def values(gradients: list[torch.Tensor | None]) -> list[float]:
    return [float(one[0]) for one in gradients if one is not None]


def test_the_first_step_writes_and_later_ones_add() -> None:
    steps = Steps()
    assert [values(steps.run()) for _ in range(3)] == [[1, 2], [2, 4], [3, 6]]
    assert steps.ran == [False, True, True]


def test_gradients_elsewhere_are_added_to_in_place() -> None:
    steps = Steps()
    own = steps.weights[0].grad = torch.full((3,), 10.0)
    assert values(steps.run()) == [11, 2]
    assert steps.weights[0].grad is own
    assert values(steps.run()) == [12, 4]


def test_a_gradient_that_is_kept_stays() -> None:
    steps = Steps()
    kept = steps.run()
    for weight in steps.weights:
        weight.grad = None
    assert values(steps.run()) == [1, 2]
    assert values(kept) == [1, 2]
    steps.run()
    assert values(kept) == [1, 2]
    del kept
    for weight in steps.weights:
        weight.grad = None
    assert values(steps.run()) == [1, 2]
    assert steps.ran == [False, True, True, False]


def test_a_capture_that_fails_changes_nothing() -> None:
    steps = Steps()
    steps.run()
    steps.weights[0].grad = torch.full((3,), 10.0)

    def refuse(adds: bool) -> Callable[[], None]:
        raise RuntimeError("no capture")

    with pytest.raises(RuntimeError, match="no capture"):
        steps.sums.replay(steps.weights, refuse)
    assert values([weight.grad for weight in steps.weights]) == [10, 2]


def test_sparse_gradients_are_not_served() -> None:
    steps = Steps()
    assert steps.sums.serves(steps.weights)
    steps.weights[0].grad = torch.ones(3).to_sparse()
    assert not steps.sums.serves(steps.weights)
