"""Gradients of weights are added inside the graphs of a stage, and whatever a user does with `.grad` is as in eager."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from pipecompile.runtime.cuda_graphs.replay import CapturedStage
from pipecompile.runtime.cuda_graphs.weight_aliases import WeightAliases
from pipecompile.runtime.cuda_graphs.weight_gradients import WeightGradients
from pipecompile.torch_private import pytree
from tests.support.emulated_capture import EmulatedCaptures


class Slots:
    """A layer captured for two slots, as a pipeline with two micro-batches in flight has it, beside the same layer in eager."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.layer, self.captures, self.sums = nn.Linear(4, 4), EmulatedCaptures(), WeightGradients()
        self.eager = copy.deepcopy(self.layer)
        leaves, spec = pytree.tree_flatten((torch.zeros(2, 4),))
        self.slots = [
            CapturedStage(
                lambda x: (self.layer(x),), self.captures(), leaves, spec, pytest.fail, WeightAliases(self.layer), self.sums
            )
            for _ in range(2)
        ]  # fmt: skip
        for _ in range(2):  # the first backward of each slot is a rehearsal
            self.step()
            self.zero_grad()

    def step(self, count: int = 4) -> None:
        """Run a step of `count` micro-batches on both, and compare `.grad`."""
        for microbatch in range(count):
            x = torch.randn(2, 4)
            self.slots[microbatch % 2].run([x])[0].square().sum().backward()
            self.eager(x).square().sum().backward()
        self.check()

    def zero_grad(self) -> None:
        self.layer.zero_grad()
        self.eager.zero_grad()

    def check(self) -> None:
        for mine, other in zip(self.layer.parameters(), self.eager.parameters(), strict=True):
            assert torch.equal(mine.grad, other.grad)  # type: ignore[arg-type]

    def both(self, change: Callable[[nn.Linear], object]) -> list[object]:
        return [change(layer) for layer in (self.layer, self.eager)]


def test_the_first_micro_batch_writes_and_later_ones_add() -> None:
    made = Slots()
    made.step()
    for weight in made.layer.parameters():
        assert weight.grad is not None
        assert weight.grad.data_ptr() == made.sums.sum_of(weight).data_ptr()
    before = made.captures.captured, made.captures.replayed
    gradients = made.slots[0].captured_backward
    assert gradients is not None
    made.step()  # adds to the gradients of the step before
    made.zero_grad()
    made.step()
    assert made.captures.captured == before[0], "nothing is captured anew"
    assert made.captures.replayed - before[1] == 16, "a forward and a backward per micro-batch, and nothing else"
    assert all(result is None for result in gradients.results[True]), "autograd has nothing to add"


def test_gradients_that_the_user_kept_keep_their_values() -> None:
    made = Slots()
    made.step()
    kept, expected = made.both(lambda layer: layer.weight.grad)
    before = kept.clone()  # type: ignore[attr-defined]
    made.zero_grad()
    made.step()
    assert torch.equal(kept, before)  # type: ignore[arg-type]
    assert torch.equal(kept, expected)  # type: ignore[arg-type]
    del kept, expected
    made.zero_grad()
    made.step()
    made.step()


def test_a_gradient_of_the_users_own_memory_is_added_to_in_place() -> None:
    made = Slots()
    mine, other = made.both(lambda layer: torch.ones(4, 4))
    made.layer.weight.grad, made.eager.weight.grad = mine, other  # type: ignore[assignment]
    made.step()
    assert made.layer.weight.grad is mine
    assert torch.equal(mine, other)  # type: ignore[arg-type]
    made.both(lambda layer: layer.weight.grad.mul_(0.5))  # type: ignore[union-attr]
    made.step()


def test_one_weight_without_a_gradient_beside_one_with_a_sum() -> None:
    made = Slots()
    made.step()
    made.layer.bias.grad = made.eager.bias.grad = None
    made.step()
    made.layer.zero_grad(set_to_none=False)
    made.eager.zero_grad(set_to_none=False)
    made.step(3)


@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_that_come_after_the_capture_run_once_per_micro_batch(kind: str) -> None:
    made, seen = Slots(), [list[torch.Tensor](), list[torch.Tensor]()]
    for layer, notes in zip((made.layer, made.eager), seen, strict=True):
        getattr(layer.weight, kind)(
            lambda value, notes=notes: notes.append((value if value.grad is None else value.grad).detach().clone())
        )
    made.step()
    assert len(seen[0]) == len(seen[1]) == 4
    assert all(map(torch.equal, *seen))
