"""Routes lead to the container that is there now, and a step writes into lists and dicts that its loss has put there."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import pipecompile as pc
from pipecompile.tracing.state.container_routes import ContainerRoute
from tests.support.eager import accumulate, assert_same


def test_a_route_finds_what_replaces_a_container() -> None:
    model = nn.Identity()
    model.state = {"seen": []}
    route = ContainerRoute.to(model.state["seen"], model, "state.seen")
    model.state = {"seen": ["new"]}
    assert route.find() == ["new"]
    model.state["seen"] = None
    assert route.find() == []


def test_a_container_at_another_place_is_always_the_recorded_one() -> None:
    model, other = nn.Identity(), [1]
    model.seen = []
    assert ContainerRoute.to(other, model, "seen").find() is other


class Leaving(nn.Module):
    """Leaves its values, with a gradient, in a list or a dict."""

    def __init__(self, leave: Callable[[Leaving, torch.Tensor], object]) -> None:
        super().__init__()
        self.layer, self.leave, self.seen, self.named = nn.Linear(4, 4), leave, [], {}

    def forward(self, x):
        y = self.layer(x).tanh()
        self.leave(self, y)
        return y


WAYS = {
    "append": lambda part, y: part.seen.append(y),
    "item": lambda part, y: part.named.__setitem__("y", y),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_loss_that_puts_new_containers_reads_each_micro_batch(way: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Leaving(WAYS[way]), nn.Linear(4, 4), Leaving(WAYS[way]), nn.Linear(4, 2))
    eager, x, target = copy.deepcopy(model), torch.randn(6, 4), torch.randn(6, 2)

    def loss_of(owner: nn.Sequential) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
        def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            parts = owner[0], owner[2]
            left = [one for part in parts for one in (*part.seen, *part.named.values())]
            for part in parts:
                part.seen, part.named = [], {}
            return F.mse_loss(output, target) + sum(one.square().mean() for one in left)

        return loss

    pc.compile(model, 2, n_microbatches=3, loss_fn=loss_of(model), cost="analytic").step(x, target=target)
    accumulate(eager, x, 3, loss_of(eager), target)
    assert_same(model, eager, 1e-6)
