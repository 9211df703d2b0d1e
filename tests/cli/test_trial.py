"""The eager loop that the pipeline is compared with must itself be right."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from pipecompile.cli.trial import eager_step, synthetic_loss
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
