"""Random draws in forwards: the order of draws is that of the plain loop or a warning, and a recomputation draws the same numbers."""

from __future__ import annotations

import copy
import random
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import pipecompile as pc
from pipecompile.ir import Action
from pipecompile.ir.action import Kind
from pipecompile.runtime.random_draws import Draws, ForwardDraws
from pipecompile.tracing.state.random_states import python_sources
from tests.support.eager import accumulate


def actions(text: str) -> list[Action]:
    """Return actions such as "0F1": stage, kind, micro-batch."""
    kinds = {kind.value: kind for kind in Kind}
    return [Action(int(word[0]), kinds[word[1]], int(word[2])) for word in text.split()]


@pytest.mark.parametrize(
    ("text", "draws", "is_ordered"),
    [
        ("0F0 1F0 1B0 0B0 0F1 1F1 1B1 0B1", Draws((0, 1), (0, 1)), True),
        ("0F0 1F0 0F1 1B0 1F1 0B0 1B1 0B1", Draws((0, 1)), True),
        ("0F0 1F0 0F1 1B0 1F1 0B0 1B1 0B1", Draws((0,), (1,)), False),
        ("0F0 1F0 0F1 1F1 1B0 1B1 0B0 0B1", Draws((), (1,)), True),
        ("0F0 1F0 0F1 1F1 1B0 1B1 0B0 0B1", Draws((), (0, 1)), False),
        ("0F0 0F1 1F0 1F1 1B0 0B0 1B1 0B1", Draws((0, 1)), False),
        ("0F0 0F1 1F0 1F1 1B0 0B0 1B1 0B1", Draws((1,)), True),
        ("0F0 0F2 0F1 1F0 1F2 1F1", Draws((0,)), False),
        ("0F0 0R0 0B0 0F1 0R1 0B1", Draws((0,), (0,)), True),
        ("0F0 0I0 0F1 0W0 0I1 0W1", Draws((), (0,)), True),
        ("0F0 0I0 0F1 0I1 0W0 0W1", Draws((), (0,)), False),
    ],
)
def test_the_order_is_that_of_the_loop(text: str, draws: Draws, *, is_ordered: bool) -> None:
    assert draws.is_that_of_the_loop(actions(text)) == is_ordered


@pytest.mark.parametrize(
    ("draws", "threaded", "words"),
    [
        (Draws((0, 2)), True, ["stages 0, 2, which run in threads", "dispatch='inline'"]),
        (Draws((0, 1)), False, ["stages 0, 1, which run in the order of the schedule", "a device for each stage"]),
        (
            Draws((1,)),
            True,
            ["in stage 1, which runs in threads of its own", "Try dispatch='inline', with a device for each"],
        ),
        (Draws((0,), (1,)), False, ["in the backward of stages 0, 1", "n_microbatches=1"]),
    ],
)
def test_a_warning_says_where_and_what_to_try(draws: Draws, words: list[str], *, threaded: bool) -> None:
    text = draws.warning(threaded=threaded)
    assert all(word in text for word in words), text


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
