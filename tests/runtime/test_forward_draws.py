"""Python of the user's that draws in some calls alone: a recomputation draws the same, and another order of draws is a warning."""

from __future__ import annotations

import copy
import random
import warnings

import torch
import torch.nn.functional as F
from torch import nn

import pipecompile as pc
from pipecompile.runtime.forward_draws import ForwardDraws
from pipecompile.tracing.state.random_states import python_sources
from tests.support.eager import accumulate


class DropsLater(nn.Module):
    """Kept whole, for it branches on values. Its first call, which trial runs see, draws nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.dropout, self.calls = nn.Linear(4, 4), nn.Dropout(0.5), 0

    def forward(self, x):
        self.calls += 1
        self.dropout.train(self.calls % 2 == 0)
        return self.dropout(self.layer(x if x.sum() < 1e9 else -x))


def stepped(**options) -> tuple[nn.Module, nn.Module, list[str]]:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(4, 9), nn.Linear(9, 4), DropsLater(), nn.Linear(4, 9), nn.Linear(9, 4), DropsLater()
    )
    eager, x, target = copy.deepcopy(model), torch.randn(6, 4), torch.randn(6, 4)
    pipe = pc.compile(model, loss_fn=F.mse_loss, cost="analytic", n_microbatches=3, **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.manual_seed(1)
        pipe.step(x, target=target)
    torch.manual_seed(1)
    accumulate(eager, x, 3, F.mse_loss, target)
    return model, eager, [str(one.message) for one in caught]


def test_a_recomputation_draws_what_a_forward_drew_that_no_trial_has_seen_draw() -> None:
    model, eager, _ = stepped(n_stages=2, checkpoint="always")
    for mine, other in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad)


def test_another_order_of_draws_is_a_warning() -> None:
    *_, texts = stepped(
        n_stages=4, schedule="interleaved", devices=["cpu"] * 2, pin={"2": 1, "5": 3}
    )  # the draws of two chunks
    assert any("random numbers are drawn in stages" in text for text in texts)


def test_a_forward_is_watched_until_it_draws() -> None:
    draws, runs = ForwardDraws(), []
    run = draws.watched(lambda _: runs.append(random.random() if len(runs) == 1 else 0), 3, python_sources())
    run(None)  # type: ignore[arg-type]
    assert not draws.stages
    run(None), run(None)  # type: ignore[arg-type]
    assert (draws.stages, len(runs)) == ({3}, 3)
