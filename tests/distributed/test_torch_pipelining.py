"""Stages of a pipeline of one process, as stages of `torch.distributed.pipelining`. Its schedules run in cases of torch_cases.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import pipecompile as pc
from pipecompile.distributed.torch_pipelining import PositionalStage, torch_stages
from pipecompile.driver.specialization import Specialization
from pipecompile.errors import PlanError
from tests.distributed.torch_cases import Rows, Skip

SAMPLES = 8


def build_of(model: nn.Module, n_stages: int, **options: Any) -> Specialization:
    names = ["x", "scale"][: 2 if isinstance(model, Rows) else 1]
    pipe = pc.compile(
        model, n_stages, devices=["cpu"] * n_stages, n_microbatches=2, cost="analytic", loss_fn=lambda y: y.mean(),
        example_kwargs={name: torch.randn(SAMPLES, 6) for name in names},
        split_before=[f"layers.{4 * stage // n_stages}" for stage in range(1, n_stages)], **options,
    )  # fmt: skip
    return pipe._cache.latest


def of_rank(index: int) -> Any:
    return SimpleNamespace(ranks=SimpleNamespace(index=index, group=dist.group.WORLD))


def test_positional_stages_in_a_row_compute_the_model() -> None:
    """At another batch size than the recorded; the inputs of the model are keywords after the first stage."""
    model = Rows()
    build = build_of(model, 2)
    first, second = (PositionalStage(build, index) for index in range(2))
    x, scale = torch.randn(2, 5, 6)
    between = first(x, scale)
    assert isinstance(between, tuple)
    torch.testing.assert_close(second(*between, x=x, scale=scale), model(x, scale))
    assert {id(p) for p in (*first.parameters(), *second.parameters())} == {id(p) for p in model.parameters()}


def test_a_rank_has_the_stages_of_its_device(single_rank: None) -> None:
    build = build_of(Skip(), 1)
    (stage,) = torch_stages(build, of_rank(0))
    assert (stage.stage_index, stage.num_stages) == (0, 1)
    assert torch_stages(build, of_rank(1)) == []


def test_values_that_skip_a_stage_are_refused() -> None:
    with pytest.raises(PlanError, match="goes from stage 0 past its neighbour to stage 3"):
        torch_stages(build_of(Skip(), 4), of_rank(0))


def test_deferred_batch_norm_is_refused() -> None:
    with pytest.raises(PlanError, match="deferred"):
        torch_stages(build_of(Rows(), 2, batch_norm="deferred"), of_rank(0))
