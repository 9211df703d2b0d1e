"""A plan whose stages do not fit into `memory_limit` is refused with the figures of the plan."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import pipecompile as pc
from tests.support.eager import square_loss

X = torch.randn(16, 32)


def compiled(plan: pc.Plan | None = None, x: torch.Tensor = X, n_stages: int = 2, **options: Any) -> pc.Pipeline:
    model = nn.Sequential(*[layer for _ in range(6) for layer in (nn.Linear(32, 32), nn.Tanh())])
    options = {"n_microbatches": 4, "cost": "analytic", "loss_fn": square_loss} | options
    return pc.compile(model, n_stages, example_args=(x,), plan=plan, **options)


@pytest.mark.parametrize(
    "options",
    [{}, {"offload": True}, {"schedule": "gpipe"}, {"schedule": "auto"}, {"checkpoint": "always"}, {"schedule": "interleaved"}],
)  # fmt: skip
def test_a_plan_that_does_not_fit_is_refused_with_its_figures(options: dict[str, Any]) -> None:
    plan = compiled().plan
    with pytest.raises(pc.InfeasibleError, match=r"(?s)stages of the plan do not fit.*device 0 would hold .* 1000 b"):
        compiled(plan, memory_limit=1000.0, **options)
    with pytest.raises(pc.InfeasibleError, match="device 1 would hold") as caught:
        compiled(plan, memory_limit=[1e9, 1000.0], **options)
    assert "device 0" not in str(caught.value)
    assert compiled(plan, memory_limit=1e9, **options).plan == plan


@pytest.mark.parametrize(
    ("checkpoint", "schedule", "n_stages"),
    [("auto", "1f1b", 2), ("never", "1f1b", 3), ("always", "gpipe", 3), ("except_last", "gpipe", 2), ("never", "zbv", 4)],
)  # fmt: skip
def test_a_plan_fits_into_exactly_the_limit_that_it_was_made_for(checkpoint: str, schedule: str, n_stages: int) -> None:
    options: dict[str, Any] = {"checkpoint": checkpoint, "schedule": schedule, "n_stages": n_stages}
    with pytest.raises(pc.InfeasibleError) as caught:
        compiled(memory_limit=1.0, **options)
    least = float(caught.value.hint.split(",")[0].removeprefix("memory_limit="))
    plan = compiled(memory_limit=least, **options).plan
    assert compiled(plan, memory_limit=least, **options).plan == plan
    with pytest.raises(pc.InfeasibleError, match="stages of the plan do not fit"):
        compiled(plan, memory_limit=0.9 * least, **options)


def test_what_micro_batches_hold_grows_with_their_samples() -> None:
    plan = compiled().plan
    limit = max(stage.memory for stage in plan.stages)
    assert compiled(plan, memory_limit=limit).plan == plan
    assert compiled(plan, X[:8], memory_limit=limit - 1024).plan == plan
    with pytest.raises(pc.InfeasibleError, match="device 0 would hold"):
        compiled(plan, torch.cat([X, X]), memory_limit=limit)
