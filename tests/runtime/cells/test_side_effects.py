"""Side effects of a stage are found in its graph: draws, writes, values left on the model, autocast."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pipecompile as pc
from pipecompile.runtime.cells.side_effects import SideEffects


class Plain(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).relu()


class Draws(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(super().forward(x), 0.5)


class Normalises(nn.Linear):
    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.norm = nn.BatchNorm1d(sizes[1])

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(super().forward(x))


class Leaves(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        self.feature = super().forward(x)
        return self.feature


class Casts(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return super().forward(x).float()


def effects_of(last: type[nn.Linear], **options: Any) -> SideEffects:
    """Return the effects of the last of two stages."""
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), last(4, 4)), torch.randn(4, 4)
    pipe = pc.compile(
        model, 2, example_args=(x,), devices=["cpu"] * 2, cost="analytic", n_microbatches=2, batch_norm="each",
        split_before=["2"], loss_fn=lambda y: y.sum(), **options,
    )  # fmt: skip
    pipe.step(x)
    return SideEffects.of(pipe._cache.latest.stages[-1])


def test_a_stage_of_plain_layers_has_none():
    effects = effects_of(Plain)
    assert effects.is_stateless
    assert not effects.runs_python


@pytest.mark.parametrize(
    ("last", "has"),
    [
        (Draws, lambda effects: effects.draws),
        (Normalises, lambda effects: len(effects.written_buffers) == 3),
        (Leaves, lambda effects: effects.places),
    ],
)
def test_a_stage_with_an_effect_needs_a_recipe(last, has):
    effects = effects_of(last)
    assert has(effects)
    assert not effects.is_stateless


def test_autocast_is_told_from_state():
    effects = effects_of(Casts)
    assert effects.casts
    assert effects.is_stateless
