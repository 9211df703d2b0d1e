"""A captured stage by itself, on the emulated capture: replays give what the function gives, forward and backward."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

import pipecompile as pc
from pipecompile.runtime.cuda_graphs.replay import CapturedStage, summary_of
from pipecompile.torch_private import pytree
from tests.support.emulated_capture import EmulatedCaptures

WEIGHT = 3.0


def captured(weight: torch.Tensor, refused: list[str]) -> CapturedStage:
    def stage(x: torch.Tensor) -> Sequence[torch.Tensor]:
        return x * weight, x + 1

    leaves, spec = pytree.tree_flatten((torch.zeros(2, requires_grad=True),))
    return CapturedStage(stage, EmulatedCaptures()(), leaves, spec, refused.append)


def test_each_replay_has_the_outputs_and_gradients_of_its_inputs() -> None:
    weight, refused = torch.tensor(WEIGHT, requires_grad=True), list[str]()
    stage = captured(weight, refused)
    for value in (1.0, 2.0):
        weight.grad = None
        x = torch.full((2,), value, requires_grad=True)
        product, total = stage.run([x])
        assert (product.tolist(), total.tolist()) == ([WEIGHT * value] * 2, [value + 1] * 2)
        (product.sum() + 10 * total.sum()).backward()
        assert x.grad is not None
        assert weight.grad is not None
        assert (x.grad.tolist(), weight.grad.item()) == ([WEIGHT + 10] * 2, 2 * value)
    assert not refused
    assert stage.generation == 2


def test_outputs_of_a_replay_survive_the_next_one() -> None:
    stage = captured(torch.tensor(WEIGHT), [])
    first = stage.run([torch.ones(2)])[0]
    stage.run([torch.zeros(2)])
    assert first.tolist() == [WEIGHT] * 2


def test_hooks_of_weights_run_once_and_after_the_replay() -> None:
    weight, seen = torch.tensor(WEIGHT, requires_grad=True), list[float]()
    weight.register_hook(lambda gradient: seen.append(gradient.item()))
    stage = captured(weight, [])
    stage.run([torch.ones(2, requires_grad=True)])[0].sum().backward()
    assert seen == [2.0]


def test_a_slot_replayed_again_before_its_backward_is_a_fault() -> None:
    stage = captured(torch.tensor(WEIGHT, requires_grad=True), [])
    early = stage.run([torch.ones(2, requires_grad=True)])[0]
    stage.run([torch.ones(2, requires_grad=True)])
    with pytest.raises(AssertionError, match="used again before its backward"):
        early.sum().backward()


def test_gradients_of_other_outputs_than_captured_are_refused() -> None:
    stage = captured(torch.tensor(WEIGHT, requires_grad=True), [])
    stage.run([torch.ones(2, requires_grad=True)])[0].sum().backward()
    with pytest.raises(pc.InputError, match="other outputs of a stage got gradients"):
        stage.run([torch.ones(2, requires_grad=True)])[1].sum().backward()


def test_the_first_line_of_an_error_is_enough() -> None:
    assert summary_of(ValueError("\nfirst\nsecond")) == "ValueError: first"
