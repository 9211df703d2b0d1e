"""A trial call of a loss leaves the loss, the generators and the modes of the process as they were."""

from __future__ import annotations

import random

import torch

from pipecompile.driver.loss_trial import loss_undone


class Counting:
    def __init__(self) -> None:
        self.calls = 0
        self.total = torch.zeros(())

    def __call__(self, y: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.total += 1
        return y.sum() * torch.rand(()) * random.random()


def test_what_a_loss_writes_and_draws_is_undone_and_gradients_are_on():
    loss = Counting()
    states = torch.get_rng_state(), random.getstate()
    with torch.inference_mode(), loss_undone(loss, torch.device("cpu")):
        assert loss(torch.ones(2, requires_grad=True)).requires_grad
        assert loss.calls == 1
    assert (loss.calls, loss.total.item()) == (0, 0.0)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
