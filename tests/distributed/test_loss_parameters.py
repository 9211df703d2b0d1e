from __future__ import annotations

import pytest
import torch
from torch import nn

import pipecompile as pc
from pipecompile.distributed.loss_parameters import loss_parameters, warn_of_untrained


class Weighed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.frozen = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2), requires_grad=False)

    def forward(self, y: torch.Tensor) -> torch.Tensor:
        return (y * self.weight * self.frozen).sum()


def test_the_parameters_of_a_loss_are_those_that_train_and_are_not_of_the_model() -> None:
    model, loss = nn.Linear(2, 2), Weighed()
    assert loss_parameters(lambda y: loss(y) + model.weight.norm(), model) == [loss.weight]
    assert loss_parameters(None, model) == []


@pytest.mark.filterwarnings("error")
def test_a_rank_without_the_loss_is_told_what_another_one_trains() -> None:
    model, loss = nn.Linear(2, 2), Weighed()
    with pytest.warns(
        pc.RecordingWarning,
        match=r"the loss has parameters of its own, such as weight: gradients go to those of rank 3",
    ) as caught:
        warn_of_untrained(loss, model, 3)
    assert "pipe.needs_targets" in str(caught[0].message)
    warn_of_untrained(nn.MSELoss(), model, 3)
