"""The eager loop that the pipeline is compared with must itself be right."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from pipecompile.cli.training_trial import eager_step, optimizer_named, synthetic_loss
from pipecompile.costs.optimizer_bytes import optimizer_state
from pipecompile.errors import InputError


@pytest.mark.parametrize("parts", [1, 3, 7, 99])
def test_micro_batches_give_the_loss_and_gradients_of_the_whole(parts):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 2)).double()
    whole, data = copy.deepcopy(model), torch.randn(10, 5, dtype=torch.double)
    expected = whole(data).square().mean()
    expected.backward()
    assert eager_step(model, [data], parts) == pytest.approx(float(expected.detach()), rel=1e-6)
    for ours, theirs in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-5, atol=1e-7)


def test_the_loss_looks_into_every_container_and_passes_over_whole_numbers():
    ones = torch.ones(2, 3)
    nested = {"a": ones, "b": [2 * ones, (3 * ones, torch.arange(2), None, 7)]}
    assert float(synthetic_loss(nested)) == 1 + 4 + 9


def test_nothing_to_train_is_said():
    with pytest.raises(InputError, match="no floating tensor"):
        synthetic_loss({"ids": torch.arange(3)})


@pytest.mark.parametrize("name", ["sgd", "momentum", "adam", "AdamW", "amsgrad", "rms_prop", "adadelta", "rprop"])
def test_an_optimizer_keeps_what_its_name_is_counted_for(name):
    model = nn.Linear(3, 3)
    optimizer = optimizer_named(name)(model.parameters())
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    assert optimizer_state(optimizer) == optimizer_state(name)


@pytest.mark.parametrize("name", ["lion", "sparseadam"])
def test_what_torch_cannot_train_with_is_refused(name):
    with pytest.raises(InputError, match="cannot train with"):
        optimizer_named(name)
