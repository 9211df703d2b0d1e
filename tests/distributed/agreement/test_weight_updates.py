"""What one rank notes of its optimizers and gradients between two calls."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from pipecompile.distributed.agreement.weight_updates import Updates, WeightUpdates
from pipecompile.errors import InputError

DUE = SimpleNamespace(is_due=True)


def watched(n_ranks: int = 2) -> tuple[WeightUpdates, nn.Linear]:
    """Return the updates of a layer with gradients, after a call."""
    layer = nn.Linear(3, 3)
    updates = WeightUpdates(layer.named_parameters, n_ranks, is_alone=False)
    with updates.of_program(DUE):
        layer(torch.ones(2, 3)).square().sum().backward()
    return updates, layer


def test_steps_are_counted_per_optimizer_until_the_end_of_the_next_call() -> None:
    updates, layer = watched()
    first, second = (torch.optim.SGD([one], lr=0.1) for one in layer.parameters())
    for optimizer in (first, second, second):
        optimizer.step()
    torch.optim.SGD(nn.Linear(2, 2).parameters()).step()  # of another model
    found = updates.since_last_call()
    assert found is not None
    assert (found.steps, len(found.settings), found.factor, found.parameter) == (2, 1, 1.0, "weight")
    assert found.is_changed
    with updates.of_program(DUE):
        first.step()  # in a hook: a part of the program
    now = updates.since_last_call()
    assert now is not None
    assert (now.steps, now.settings, now.is_changed) == (0, (), False)


def test_the_steps_that_copies_compare_are_told_once() -> None:
    updates, layer = watched()
    torch.optim.SGD(layer.parameters(), lr=0.1).step()
    with updates.of_program(DUE):
        pass  # an evaluation of one copy
    assert [found.steps if (found := updates.since_last_step()) else None for _ in range(2)] == [1, 0]


def test_one_factor_of_all_gradients_is_known_before_they_are_dropped() -> None:
    updates, layer = watched()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    nn.utils.clip_grad_norm_([*layer.parameters()], 1e-3)
    expected = 1e-3 / 1.0
    optimizer.step()
    optimizer.zero_grad()
    found = updates.since_last_call()
    assert found is not None
    assert found.factor is not None
    assert 0 < found.factor < expected * 10


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_that_are_left_for_the_next_step_are_seen(set_to_none: bool) -> None:
    """A rank that alone left out zero_grad() added to its gradients in every step, without a word, before."""
    updates, layer = watched()

    def is_kept() -> bool | None:
        found = updates.since_last_call()
        assert found is not None
        return found.is_kept

    assert is_kept() is None, "nothing is asked of gradients before a step"
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
    optimizer.step()
    assert is_kept()
    layer.zero_grad(set_to_none=set_to_none)
    assert is_kept() is False
    layer(torch.ones(2, 3)).sum().backward()
    layer.bias.requires_grad_(False)
    layer.weight = nn.Parameter(torch.ones(3, 3))
    assert is_kept() is None, "no optimizer clears what is frozen or gone"
    with updates.of_program(DUE):
        pass  # an evaluation
    optimizer.step()
    assert is_kept() is None


def test_gradients_with_factors_of_their_own_say_nothing() -> None:
    updates, layer = watched()
    assert layer.bias.grad is not None
    layer.bias.grad *= 2
    torch.optim.SGD(layer.parameters(), lr=0.1).step()
    found = updates.since_last_call()
    assert found is not None
    assert found.factor is None


def test_a_rank_that_trains_nothing_says_nothing() -> None:
    layer = nn.Linear(3, 3).requires_grad_(False)
    updates = WeightUpdates(layer.named_parameters, 2, is_alone=False)
    with updates.of_program(DUE):
        pass
    assert updates.since_last_call() is None
    assert updates.since_last_step() is None


def test_an_optimizer_that_needs_all_parameters_is_refused_when_it_steps() -> None:
    _, layer = watched()
    with pytest.raises(InputError, match="each of 2 ranks has those of its own stages"):
        torch.optim.LBFGS([*layer.parameters()]).step(lambda: 0.0)
    _, layer = watched(n_ranks=1)  # several copies, each on one rank
    torch.optim.LBFGS([*layer.parameters()]).step(lambda: 0.0)


def test_what_uses_gradients_that_are_not_whole_is_refused_before_it_steps() -> None:
    layer = nn.Linear(2, 2)

    def refuse(what: str) -> None:
        raise InputError(f"not {what}")

    updates = WeightUpdates(layer.named_parameters, 1, refuse, is_alone=False)
    weight = layer.weight.detach().clone()
    layer(torch.ones(1, 2)).sum().backward()
    with pytest.raises(InputError, match="not a step of SGD"):
        torch.optim.SGD(layer.parameters(), 0.1).step()
    assert torch.equal(layer.weight, weight)
    del updates


def test_updates_have_a_text_form_and_a_key_of_what_ranks_have_in_common() -> None:
    updates = Updates(1, ("A", "B"), 0.1234, "0.weight", is_changed=True)
    assert Updates.from_json(updates.to_json()) == updates
    assert updates.key == Updates(1, ("A", "B"), 0.1236, "2.weight", is_changed=False).key
    assert updates.key != Updates(2, ("A", "B"), 0.1234, "0.weight", is_changed=True).key
