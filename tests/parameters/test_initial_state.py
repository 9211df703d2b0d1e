from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from pipecompile.errors import InputError
from pipecompile.parameters.initial_state import initialised
from pipecompile.parameters.optimizer_state import load_optimizer_state, optimizer_state_of

OPTIMIZERS: list[tuple[type[torch.optim.Optimizer], dict[str, Any]]] = [
    (torch.optim.SGD, {"lr": 0.1}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}),
    (torch.optim.AdamW, {"lr": torch.tensor(0.01), "amsgrad": True}),
    (torch.optim.NAdam, {}),
    (torch.optim.RAdam, {}),
    (torch.optim.Rprop, {"lr": 0.1}),
    (torch.optim.ASGD, {"lr": 0.1, "t0": 0}),
    (torch.optim.Adafactor, {}),
    (torch.optim.Adagrad, {}),
]


def stepped(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for factor in range(1, 4):
        optimizer.zero_grad()
        (model(torch.ones(1, 3, dtype=model.weight.dtype)) * factor).square().sum().backward()
        optimizer.step()


@pytest.mark.parametrize(("kind", "options"), OPTIMIZERS)
@pytest.mark.parametrize("loads", [False, True])
def test_training_goes_on_as_if_the_state_had_not_been_read(
    kind: type[torch.optim.Optimizer], options: dict[str, Any], *, loads: bool
) -> None:
    """Adam counted a step more, since torch makes the state of a new optimizer by a step; and so did what loaded it."""
    model = nn.Linear(3, 2).double()
    other = copy.deepcopy(model)
    expected = copy.deepcopy(model)
    optimizer = kind(model.parameters(), **copy.deepcopy(options))
    state = optimizer_state_of(dict(model.named_parameters()), optimizer)
    assert all(value == 0 for name, value in state.items() if name.endswith(".step"))
    if loads:
        model, optimizer = other, kind(other.parameters(), **copy.deepcopy(options))
        load_optimizer_state(dict(model.named_parameters()), optimizer, state)
    stepped(model, optimizer)
    stepped(expected, kind(expected.parameters(), **copy.deepcopy(options)))
    assert torch.equal(model.weight, expected.weight)


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.SGD])
def test_neither_hooks_nor_a_scheduler_see_the_reading(kind: Any) -> None:
    model, seen = nn.Linear(3, 2), list[str]()
    optimizer = kind(model.parameters(), lr=0.5)
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    removed = register_optimizer_step_post_hook(lambda *_: seen.append("any"))
    torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    before, groups = dict(vars(optimizer)), copy.deepcopy(optimizer.state_dict()["param_groups"])
    state = optimizer_state_of(dict(model.named_parameters()), optimizer)
    removed.remove()
    assert (seen, dict(vars(optimizer)), optimizer.state_dict()["param_groups"]) == ([], before, groups)
    assert state["param_groups.weight.lr"] == 0.5
    stepped(model, optimizer)
    assert seen == ["before"] * 3


def test_an_optimizer_after_its_first_step_keeps_its_state() -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters())
    stepped(model, optimizer)
    kept = dict(optimizer.state)
    with initialised(optimizer) as initial:
        assert not initial.state
    assert dict(optimizer.state) == kept


def test_a_load_that_fails_leaves_a_new_optimizer_new() -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters())
    with pytest.raises(InputError, match="of another optimizer"):
        load_optimizer_state(dict(model.named_parameters()), optimizer, {"x": 1})
    assert not optimizer.state
