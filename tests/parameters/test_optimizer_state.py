from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import pipecompile as pc
from pipecompile.errors import InputError
from pipecompile.parameters.optimizer_state import load_optimizer_state, optimizer_state_of


def adam(model: nn.Module) -> torch.optim.Adam:
    return torch.optim.Adam(model.parameters(), lr=0.5)


def stepped(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()


def test_entries_are_named_by_parameters() -> None:
    model = nn.Linear(3, 2)
    optimizer = adam(model)
    stepped(model, optimizer)
    state = optimizer_state_of({"layers.0.weight": model.weight, "layers.0.bias": model.bias}, optimizer)
    assert torch.equal(state["state.layers.0.weight.exp_avg"], optimizer.state[model.weight]["exp_avg"])
    assert state["param_groups.layers.0.bias.lr"] == 0.5


def test_an_optimizer_before_its_first_step_has_its_initial_state() -> None:
    model = nn.Linear(3, 2)
    before = copy.deepcopy(model.state_dict())
    state = optimizer_state_of(dict(model.named_parameters()), adam(model))
    assert not state["state.weight.exp_avg"].any()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_loaded_state_continues_as_the_saved_one() -> None:
    first = nn.Linear(3, 2)
    second = copy.deepcopy(first)
    saved, loaded = adam(first), adam(second)
    stepped(first, saved)
    second.load_state_dict(first.state_dict())
    load_optimizer_state(
        dict(second.named_parameters()), loaded, optimizer_state_of(dict(first.named_parameters()), saved)
    )
    for model, optimizer in ((first, saved), (second, loaded)):
        optimizer.zero_grad()
        stepped(model, optimizer)
    assert torch.equal(first.weight, second.weight)


def test_gradients_are_kept() -> None:
    model = nn.Linear(3, 2)
    gradient = model.weight.grad = torch.ones_like(model.weight)
    optimizer_state_of(dict(model.named_parameters()), adam(model))
    assert model.weight.grad is gradient


def test_gradients_and_empty_groups_do_not_matter() -> None:
    """PyTorch's own functions would leave the state empty for the first, and fail for the second."""
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    pipe = pc.compile(model, 2, devices=["cpu"] * 2, example_args=(torch.ones(4, 6),), cost="analytic")
    groups = [{"params": [], "lr": 1.0}, {"params": list(pipe.parameters()), "lr": 0.5}]
    first, second = (torch.optim.Adam(copy.copy(groups)) for _ in range(2))
    for parameter in pipe.parameters():
        parameter.grad = torch.ones_like(parameter)
    first.step()
    pipe.load_optimizer_state_dict(second, pipe.optimizer_state_dict(first))
    assert [group["lr"] for group in second.param_groups] == [1.0, 0.5]
    for parameter in pipe.parameters():
        assert torch.equal(second.state[parameter]["exp_avg"], first.state[parameter]["exp_avg"])
        assert bool((parameter.grad == 1).all())
    assert second.state[model[0].weight]["step"] == 1


def test_an_optimizer_without_parameters_has_no_state() -> None:
    """A rank whose stages are frozen trains none of its parameters: it was an error of torch, and no checkpoint could be saved."""
    layer, other = nn.Linear(2, 2).requires_grad_(False), nn.Linear(2, 2)
    own, optimizer = dict(layer.named_parameters()), torch.optim.AdamW([{"params": []}])
    assert optimizer_state_of(own, optimizer) == {}
    load_optimizer_state(own, optimizer, {})
    load_optimizer_state(own, optimizer, optimizer_state_of(dict(other.named_parameters()), adam(other)))
    assert [group["params"] for group in optimizer.param_groups] == [[]]


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (None, "state_dict=None is not a dictionary by names"),
        ({0: 1}, "state_dict={0: 1} is not a dictionary by names"),
        ({"x": 1}, "state_dict is of another optimizer"),
        ({}, "state_dict is of another optimizer"),
    ],
)
def test_a_state_of_something_else_is_refused(state: Any, message: str) -> None:
    layer = nn.Linear(2, 2)
    with pytest.raises(InputError, match=message):
        load_optimizer_state(dict(layer.named_parameters()), torch.optim.Adam(layer.parameters()), state)
    with pytest.raises(InputError, match="optimizer=None is not an optimizer"):
        optimizer_state_of(dict(layer.named_parameters()), None)  # type: ignore[arg-type]


def test_parameters_of_other_ranks_are_left_out_and_kept_by_the_optimizer() -> None:
    """An optimizer that was made before the first step, when no rank knows its part yet, was a KeyError."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    optimizer = adam(model)
    stepped(model, optimizer)
    here, elsewhere = dict(model[1].named_parameters()), [*model[0].parameters()]
    state = optimizer_state_of(here, optimizer, elsewhere)
    assert {key.split(".")[1] for key in state} == {"weight", "bias"}
    kept = optimizer.state[elsewhere[0]]
    load_optimizer_state(here, optimizer, state, elsewhere)
    assert [len(group["params"]) for group in optimizer.param_groups] == [4]
    assert optimizer.state[elsewhere[0]] is kept
    stepped(model, optimizer)


def test_parameters_of_something_else_are_named() -> None:
    """It was a KeyError."""
    model, other = nn.Linear(3, 2), nn.Linear(5, 7)
    optimizer = torch.optim.SGD([*model.parameters(), *other.parameters()], lr=0.1)
    with pytest.raises(InputError, match=r"parameters that are not the pipeline's: 2, the first of shape \(7, 5\)"):
        optimizer_state_of(dict(model.named_parameters()), optimizer)
