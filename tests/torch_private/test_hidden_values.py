"""Parameters that cannot be read for a while: every way to their values raises, and what reads no values works."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import linear

from pipecompile.torch_private.hidden_values import addresses_of, hidden, hide, is_hidden, show


class Absent(Exception):
    """The error of these tests."""


def absent(_parameter: torch.Tensor) -> Absent:
    return Absent()


X = torch.ones(2, 3)
READS: dict[str, Callable[[nn.Linear], Any]] = {
    "its layer": lambda layer: layer(X),
    "a function": lambda layer: linear(X, layer.weight),
    "a method": lambda layer: layer.weight.norm(),
    "an operator": lambda layer: X @ layer.weight,
    "an index": lambda layer: layer.weight[0],
    "data": lambda layer: layer.weight.data,
    "detach": lambda layer: layer.weight.detach(),
    "item": lambda layer: layer.weight.sum().item(),
    "a list of tensors": lambda layer: torch.cat([X, layer.weight]),
    "without gradients": torch.no_grad()(lambda layer: layer.weight.square()),
    "numpy": lambda layer: layer.weight.numpy(force=True),
    "in place": torch.no_grad()(lambda layer: layer.weight.mul_(2)),
}


@pytest.mark.parametrize("read", READS)
def test_what_reads_values_raises(read: str) -> None:
    layer = nn.Linear(3, 3)
    with hidden([layer.weight], absent), pytest.raises(Absent):
        READS[read](layer)
    READS[read](layer)


def test_what_reads_no_values_works() -> None:
    layer = nn.Linear(3, 4)
    weight = layer.weight
    with hidden([weight], absent):
        assert isinstance(weight, nn.Parameter)
        assert (weight.shape, weight.dtype, weight.device.type, weight.numel()) == ((4, 3), torch.float32, "cpu", 12)
        assert weight.requires_grad
        assert weight.grad is None
        weight.grad = torch.ones(4, 3)
        assert next(layer.parameters()) is weight
        assert {weight: 1}[weight] == 1


def test_the_memory_of_a_hidden_parameter_has_an_address() -> None:
    parameter = nn.Parameter(torch.ones(2))
    address = parameter.data_ptr()
    with hidden([parameter], absent):
        assert addresses_of([parameter, X]) == [address, X.data_ptr()]


def test_gradients_reach_a_hidden_parameter() -> None:
    layer = nn.Linear(3, 3)
    loss = layer(X).sum()
    with hidden([layer.weight], absent):
        loss.backward()
    assert torch.equal(layer.weight.grad, torch.full((3, 3), 2.0))


def test_a_parameter_has_its_own_class_again() -> None:
    """Also one of a class of the user, and after an error. An inner context leaves it hidden."""

    class Own(nn.Parameter):
        pass

    weight = Own(torch.ones(2))
    with hidden([weight], absent):
        with pytest.raises(Absent), hidden([weight], absent):
            weight.sum()
        assert is_hidden(weight)
    assert type(weight) is Own
    assert vars(weight) == {}
    hide(weight, absent)
    show(weight)
    show(weight)
    assert (weight + 1).sum() == 4
