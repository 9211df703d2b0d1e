"""Draws are counted by the operators' tags, and functions of the random state do nothing on fake tensors."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from pipecompile.torch_private.modes import FakeTensorMode
from pipecompile.tracing.interception.randomness import RandomDrawCounter, rng_function


def test_draws_are_counted() -> None:
    with RandomDrawCounter() as counter:
        torch.ones(3).exp()
        assert counter.count == 0
        torch.rand(3)
        F.dropout(torch.ones(3), 0.5)
        F.dropout(torch.ones(3), 0.5, training=False)
    assert counter.count == 2


def test_on_fake_tensors_the_state_stays_as_it_is() -> None:
    before = torch.get_rng_state()
    with FakeTensorMode():
        assert rng_function(torch.manual_seed)(3) is None
        state = rng_function(torch.get_rng_state)()
    assert (state.shape, state.dtype) == (before.shape, before.dtype)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_run_calls_the_function_itself() -> None:
    seed = rng_function(torch.manual_seed)
    assert seed.__name__ == "manual_seed"
    assert rng_function(torch.manual_seed) is seed
    seed(3)
    first = torch.rand(2)
    seed(3)
    assert torch.equal(torch.rand(2), first)
