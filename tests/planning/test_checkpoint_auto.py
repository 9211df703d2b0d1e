"""Which stages recompute is chosen with the cut: none without need, and those that a limit demands."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import pipecompile as pc
from pipecompile.ir import Kind
from tests.support.eager import square_loss

X = torch.randn(8, 16, 16, 16)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[layer for _ in range(8) for layer in (nn.Conv2d(16, 16, 3, padding=1), nn.Tanh())])


def compiled(model: nn.Module | None = None, **options: object) -> pc.Pipeline:
    return pc.compile(
        model or network(), 4, example_args=(X,), cost="analytic", devices=["cpu"] * 4, n_microbatches=8,
        loss_fn=square_loss, **options,
    )  # fmt: skip


def recomputing(pipe: pc.Pipeline) -> set[int]:
    return {action.stage for row in pipe.schedule.rows for action in row if action.kind is Kind.RECOMPUTE}


def test_without_a_limit_nothing_recomputes() -> None:
    pipe = compiled(checkpoint="auto")
    assert pipe.plan.recompute == (False,) * 4
    assert recomputing(pipe) == set()
    assert "recompute" not in str(pipe)


def test_a_limit_makes_the_first_stages_recompute_and_the_step_is_the_same(tmp_path) -> None:
    free = compiled().plan
    first = free.stages[0]
    limit = 0.6 * first.memory  # the first stage has four micro-batches in flight
    with pytest.raises(pc.InfeasibleError, match='checkpoint="auto"'):
        compiled(memory_limit=limit)
    model = network()
    pipe = compiled(model, memory_limit=limit, checkpoint="auto")
    plan = pipe.plan
    assert any(plan.recompute)
    assert not all(plan.recompute)
    assert recomputing(pipe) == {s for s, redone in enumerate(plan.recompute) if redone}
    assert all(stage.memory <= limit for stage in plan.stages)
    assert plan.bottleneck > free.bottleneck
    assert "forward is recomputed in stage 0" in str(pipe)
    loss = pipe.step(X)
    eager = network()
    parts = [square_loss(eager(part)) / 8 for part in X.chunk(8)]
    for part in parts:
        part.backward()
    assert loss.item() == pytest.approx(sum(part.item() for part in parts), rel=1e-5)
    for mine, theirs in zip(model.parameters(), eager.parameters(), strict=True):
        assert torch.allclose(mine.grad, theirs.grad, rtol=1e-4, atol=1e-6)
    plan.save(tmp_path / "plan.json")
    again = compiled(plan=tmp_path / "plan.json", checkpoint="auto")
    assert recomputing(again) == recomputing(pipe)
    assert recomputing(pipe.reschedule("gpipe")) == {s for s, redone in enumerate(plan.recompute) if redone}


def test_what_is_told_to_recompute_costs_time_and_saves_memory() -> None:
    never, always = compiled().plan, compiled(checkpoint="always").plan
    assert always.bottleneck > never.bottleneck
    assert always.stages[0].memory < 0.6 * never.stages[0].memory
    flagged = compiled(checkpoint=[True, False, False, False]).plan
    assert flagged.stages[0].memory < never.stages[0].memory
    assert flagged.bottleneck <= always.bottleneck
