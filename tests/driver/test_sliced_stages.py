"""The stages of a model on slices."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import pipecompile as pc
from pipecompile.driver.sliced_stages import SlicedStages
from pipecompile.errors import PlanError
from pipecompile.runtime.cells.sliced import SlicedAttention, SlicedPositions, SlicedRows
from tests.support.decoders import Between, Decoder, token_loss, tokens_and_labels


def stages_of(model: nn.Module) -> SlicedStages:
    schedule = pc.build_schedule("seq1f1b", 2, 2, n_slices=4)
    tokens, _ = tokens_and_labels()
    pipe = pc.compile(model, 2, schedule=schedule, loss_fn=token_loss, cost="analytic", example_args=(tokens,))
    stages: SlicedStages = pipe._cache.latest.slicing[4]
    return stages


def test_what_depends_on_the_slice_reads_the_state_of_its_stage() -> None:
    stages = stages_of(Decoder(3))
    layers = [layer for stage in stages.specialization.stages for layer in stage.module.modules()]
    assert stages.length == 4
    assert [state.n_attentions for state in stages.states] == [
        sum(isinstance(layer, SlicedAttention) for layer in stage.module.modules())
        for stage in stages.specialization.stages
    ]
    assert sum(state.n_attentions for state in stages.states) == 3
    assert sum(isinstance(layer, SlicedPositions) for layer in layers) == 1
    assert stages.specialization.states == stages.states


def test_tables_are_cut_and_masks_left_out() -> None:
    def function(_: nn.Module, x: torch.Tensor) -> torch.Tensor:
        length = x.shape[1]
        x = x + torch.ones(32, 16)[:length]
        return F.scaled_dot_product_attention(x, x, x, attn_mask=torch.ones(length, length, dtype=torch.bool).tril())

    stages = stages_of(Between(function))
    layers = [layer for stage in stages.specialization.stages for layer in stage.module.modules()]
    assert sum(isinstance(layer, SlicedRows) for layer in layers) == 1
    names = [node.name for node in stages.specialization.graph.graph.nodes]
    assert not any("tril" in name for name in names)


def test_bytes_of_routes_are_those_of_micro_batches() -> None:
    stages = stages_of(Decoder(3))
    form = stages.specialization
    assert form.routes
    assert sum(route.nbytes for route in form.routes) > 0
    program = pc.compile(
        Decoder(3), 2, n_microbatches=2, loss_fn=token_loss, cost="analytic", example_args=tokens_and_labels()[:1]
    ).program
    own = {route.value: route.nbytes for route in form.routes}
    assert all(own.get(route.value, route.nbytes) == route.nbytes for route in program.routes)


class Branch(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x if (x > 9).any() else x


@pytest.mark.parametrize(
    ("function", "layer", "words"),
    [
        (lambda m, x: checkpoint(m.layer, x, use_reentrant=False), nn.Linear(16, 16), "calls torch.utils.checkpoint"),
        (lambda m, x: m.layer(x), Branch(), "has a part that is kept whole"),
    ],
)
def test_parts_whose_positions_are_not_known_are_refused(function: Any, layer: nn.Module, words: str) -> None:
    with pytest.raises(PlanError, match=f"the model cannot run on slices of a sequence: it {words}"):
        stages_of(Between(function, layer=layer))


def test_a_model_that_fails_on_a_slice_is_refused_as_one_without_a_sequence() -> None:
    with pytest.raises(PlanError, match="cannot run on slices of a sequence: its forward fails on a slice") as caught:
        pc.compile(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)), 2, schedule="seq1f1b", n_microbatches=2,
                   loss_fn=F.mse_loss, cost="analytic", example_args=(torch.randn(4, 8),))  # fmt: skip
    assert "of 8 positions: the forward of Sequential raised RuntimeError" in str(caught.value)
    assert "call the model itself" not in str(caught.value)
