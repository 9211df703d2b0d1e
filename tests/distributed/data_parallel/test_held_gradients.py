"""Gradients that steps under `no_sync` hold, on one copy, without processes."""

from __future__ import annotations

from contextlib import suppress

import pytest
import torch
from torch import nn

from pipecompile.distributed.data_parallel.held_gradients import HeldGradients
from pipecompile.errors import InputError


def held(value: float = 1.0, before: float | None = None) -> tuple[HeldGradients, nn.Parameter]:
    """Return what one step has left on a parameter of two elements, whose gradient had been summed `before`."""
    held, parameter = HeldGradients(), nn.Parameter(torch.zeros(2))
    parameter.grad = None if before is None else torch.full((2,), before)
    step(held, parameter, value)
    return held, parameter


def step(held: HeldGradients, parameter: nn.Parameter, value: float) -> None:
    with held.revealed():
        held.keep([(parameter, torch.full((2,), value))])


def total(held: HeldGradients, parameter: nn.Parameter) -> list[float] | None:
    found = held.of(parameter)
    return None if found is None else found.tolist()


def test_parts_of_steps_are_added_up_and_hidden() -> None:
    one, parameter = held()
    assert parameter.grad is not None
    assert parameter.grad.isnan().all()
    step(one, parameter, 2.0)
    assert total(one, parameter) == [3.0, 3.0]


def test_what_was_summed_before_is_seen_in_a_step_and_afterwards() -> None:
    one, parameter = held(before=5.0)
    with one.revealed():
        assert parameter.grad is not None
        assert parameter.grad.tolist() == [5.0, 5.0]
    assert parameter.grad.isnan().all()
    with one.revealed():
        one.clear()
    assert parameter.grad.tolist() == [5.0, 5.0]


def test_a_copy_without_samples_holds_nothing_but_that_the_parameter_was_trained() -> None:
    one, parameter = HeldGradients(), nn.Parameter(torch.zeros(2))
    for part in (None, torch.ones(2), None):
        with one.revealed():
            one.keep([(parameter, part)])
        assert one.has(parameter)
        assert parameter.grad is not None
        assert parameter.grad.isnan().all()
    assert total(one, parameter) == [1.0, 1.0]


def test_a_step_that_fails_changes_nothing() -> None:
    one, parameter = held()
    with suppress(ValueError), one.revealed():
        parameter.grad = torch.ones(2)
        raise ValueError
    assert parameter.grad is not None
    assert parameter.grad.isnan().all()
    assert total(one, parameter) == [1.0, 1.0]


def test_gradients_that_are_cleared_take_what_is_held_along() -> None:
    one, parameter = held()
    parameter.grad = None
    one.check()
    assert total(one, parameter) is None
    one.refuse("a step of SGD")


@pytest.mark.parametrize("how", ["in place", "by a list", "replaced"])
def test_gradients_that_are_written_are_refused(how: str) -> None:
    one, parameter = held()
    one.check()
    assert parameter.grad is not None
    if how == "replaced":
        parameter.grad = torch.ones(2)
    elif how == "in place":
        parameter.grad.mul_(2)
    else:
        torch._foreach_zero_([parameter.grad.detach()])
    with pytest.raises(InputError, match="a gradient was written between a step under no_sync and the next step"):
        one.check()


def test_what_uses_gradients_is_refused_while_some_are_held() -> None:
    one, _ = held()
    with pytest.raises(InputError, match="a step of SGD before the copies of the pipeline have summed their gradients"):
        one.refuse("a step of SGD")


def test_contexts_may_lie_within_each_other() -> None:
    one = HeldGradients()
    with one.holding():
        with one.holding():
            assert one.mode == "under no_sync"
        assert one.is_on
    assert not one.is_on
    assert not one.mode
