"""Random draws, and a list that all stages extend, in the order of the plain loop: one thread, one stage per device."""

from __future__ import annotations

import copy
import random
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import pipecompile as pc

pytestmark = [pytest.mark.smoke, pytest.mark.filterwarnings("ignore::pipecompile.RecordingWarning")]


class Locked(nn.Module):
    """One dropout mask for all layers, drawn in the first stage; further draws of torch and of Python, and a list, in each stage."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.log: list[int] = []

    def forward(self, x):
        mask = F.dropout(torch.ones_like(x), 0.3)
        for number, layer in enumerate(self.layers):
            x = self.scaled(x + F.dropout(layer(x * mask), 0.2), number)
        return x

    def scaled(self, x, number):
        if random.random() < 0.3 and x.mean() < 9:
            self.log.append(number)
            return x * 2
        return x


def square(output, target):
    return (output - target).square().mean()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("checkpoint", ["never", "always"])
@pytest.mark.parametrize("schedule", ["1f1b", "eager-1f1b", "zb-h2", "gpipe", "hanayo"])
def test_draws_are_those_of_the_loop(schedule: str, checkpoint: Any) -> None:
    torch.manual_seed(0)
    model = Locked()
    eager = copy.deepcopy(model)
    pipe = pc.compile(
        model, 3, n_microbatches=5, loss_fn=square, cost="analytic", schedule=schedule, checkpoint=checkpoint, dispatch="inline"
    )  # fmt: skip
    for step in range(3):
        x, target = torch.randn(15, 8), torch.randn(15, 8)
        torch.manual_seed(step), random.seed(step)
        loss = pipe.step(x, target=target)
        states = torch.get_rng_state(), random.getstate()
        torch.manual_seed(step), random.seed(step)
        losses = [square(eager(a), b) / 5 for a, b in zip(x.chunk(5), target.chunk(5), strict=True)]
        sum(losses).backward()
        torch.testing.assert_close(loss, sum(losses).detach())
        assert torch.equal(states[0], torch.get_rng_state())
        assert states[1] == random.getstate()
        assert model.log == eager.log
        for mine, other in zip(model.parameters(), eager.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, other.grad)


class Dropped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.2)) for _ in range(4)))

    def forward(self, x):
        return self.layers(x)


@pytest.mark.filterwarnings("default::pipecompile.RecordingWarning")
@pytest.mark.parametrize(
    ("options", "is_warned"),
    [
        ({"dispatch": "threads"}, True),
        ({"schedule": "interleaved", "devices": ["cpu", "cpu"]}, True),
        ({"schedule": "zbv", "devices": ["cpu", "cpu"]}, True),
        ({"schedule": "zb-h2"}, False),
        ({"schedule": "interleaved", "devices": ["cpu", "cpu"], "n_microbatches": 1}, False),
    ],
    ids=str,
)
def test_another_order_is_a_warning(options: dict[str, Any], is_warned: bool) -> None:
    model = Dropped()
    pipe = pc.compile(model, 4, **{"n_microbatches": 4, "loss_fn": square, "cost": "analytic"} | options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pipe.step(torch.randn(8, 8), target=torch.randn(8, 8))
        pipe.step(torch.randn(8, 8), target=torch.randn(8, 8))
        model.eval()
        pipe.step(torch.randn(8, 8), target=torch.randn(8, 8))
    assert sum("random numbers are drawn in stages" in str(one.message) for one in caught) == is_warned


@pytest.mark.filterwarnings("default::pipecompile.RecordingWarning")
@pytest.mark.parametrize("place", [1, 2], ids=["first stage", "last stage"])
@pytest.mark.parametrize(
    ("options", "is_warned"),
    [
        ({"schedule": "chimera"}, [True, False]),
        ({"schedule": "dualpipe"}, [True, False]),
        ({"schedule": "chimera", "dispatch": "threads"}, [True, True]),
        ({"schedule": "1f1b", "dispatch": "threads"}, [False, False]),
        ({"schedule": "zb-h2"}, [False, False]),
    ],
    ids=str,
)
def test_one_stage_that_draws_out_of_order_is_a_warning(
    options: dict[str, Any], is_warned: list[bool], place: int
) -> None:
    """A stage alone was taken to run its micro-batches in order. Its copies in a schedule of several directions do not."""
    layers = [nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)]
    layers.insert(place, nn.Dropout(0.5))
    model, x, target = nn.Sequential(*layers), torch.randn(8, 8), torch.randn(8, 8)
    eager = copy.deepcopy(model)
    pipe = pc.compile(model, 2, **{"n_microbatches": 4, "loss_fn": square, "cost": "analytic"} | options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.manual_seed(1)
        pipe.step(x, target=target)
    torch.manual_seed(1)
    sum(square(eager(a), b) / 4 for a, b in zip(x.chunk(4), target.chunk(4), strict=True)).backward()
    is_found = any("random numbers are drawn in stage" in str(one.message) for one in caught)
    is_equal = torch.allclose(model[0].weight.grad, eager[0].weight.grad)
    assert is_found == is_warned[place - 1]
    assert is_found or is_equal
