"""The cut with the shortest step: towers get stages of their own, and nothing gets slower."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

import pipecompile as pc
from tests.support.compilations import layers


class Towers(nn.Module):
    """Towers of four equal layers on one input, and a small head."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.towers = nn.ModuleList(nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))) for _ in range(count))
        self.head = nn.Linear(64 * count, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.cat([tower(x) for tower in self.towers], 1))


def compiled(model: nn.Module, n_stages: int, **keywords: Any) -> pc.Pipeline:
    options: dict[str, Any] = {"n_microbatches": 4 * n_stages, "devices": ["cpu"] * n_stages} | keywords
    size = next(model.parameters()).shape[1]
    return pc.compile(
        model, n_stages, example_args=(torch.randn(16 * n_stages, size),), loss_fn=torch.Tensor.mean, cost="analytic",
        check=False, time_limit=0.5, partitioner="dp", **options,
    )  # fmt: skip


class Pyramid(nn.Module):
    """Convolutions that halve the picture and double it again, with a skip connection at each size."""

    def __init__(self, depth: int = 3, width: int = 8) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, width, 3, padding=1)
        self.down = nn.ModuleList(nn.Conv2d(width * 2**i, width * 2 ** (i + 1), 3, 2, 1) for i in range(depth))
        self.up = nn.ModuleList(nn.Conv2d(width * 2 ** (i + 1), width * 2**i, 3, padding=1) for i in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        skips = []
        for layer in self.down:
            skips.append(x)
            x = layer(x).relu()
        for layer, skip in zip(reversed(self.up), reversed(skips), strict=True):
            x = nn.functional.interpolate(layer(x), scale_factor=2.0) + skip
        return x


def test_slow_links_do_not_leave_devices_idle_where_they_send_beside_the_work() -> None:
    pipe = pc.compile(
        Pyramid(), 4, example_args=(torch.zeros(32, 3, 64, 64),), n_microbatches=16, loss_fn=torch.Tensor.mean,
        schedule="1f1b", cost="analytic", bandwidth=4e9, devices=["cpu"] * 4, check=False,
    )  # fmt: skip
    step = pipe.plan.step
    assert step is not None
    assert step.seconds < 0.8 * step.first_seconds
    assert step.seconds == pytest.approx(pipe.simulate().makespan)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("count", [3, 5])
def test_the_free_cut_is_as_short_as_pinned_towers(count: int) -> None:
    pins = {f"towers.{i}": i for i in range(count)} | {"cat": count, "head": count}
    free, pinned = (compiled(Towers(count), count + 1, pin=pin) for pin in (None, pins))
    assert free.plan.step is not None
    assert free.plan.step.seconds <= pinned.simulate().makespan * (1 + 1e-9)
    assert free.plan.step.lower_bound <= free.plan.step.seconds <= free.plan.step.first_seconds
    assert free.simulate().makespan == pytest.approx(free.plan.step.seconds)


def test_a_longer_step_of_the_least_bottleneck_is_said_and_both_bounds_are() -> None:
    pipe = compiled(Towers(5), 6)
    step = pipe.plan.step
    assert step is not None
    assert step.seconds < step.first_seconds * 0.98
    assert pipe.plan.bottleneck >= step.first_bottleneck >= pipe.plan.lower_bound
    text = " ".join(str(pipe).split())
    assert "no cut has a step below" in text
    assert "that with the least bottleneck takes" in text
    assert pipe.plan.method == "step"


def test_the_plan_is_the_same_again_and_a_file_keeps_the_step() -> None:
    first, again = (compiled(Towers(4), 5).plan for _ in range(2))
    assert (first.stage_of, first.step) == (again.stage_of, again.step)
    assert pc.Plan.from_json(first.to_json()) == first


def test_pins_and_the_limit_of_memory_hold() -> None:
    pinned = compiled(Towers(3), 4, pin={"towers.0.0": 0, "towers.0.3": 2})
    assert {pinned.plan.stage_of[name] for name in pinned.plan.stage_of if "towers_0_3" in name} == {2}
    free = compiled(Towers(3), 4)
    peak = max(stage.memory for stage in free.plan.stages)
    tight = compiled(Towers(3), 4, memory_limit=1.3 * peak)
    assert all(stage.memory <= 1.3 * peak for stage in tight.plan.stages)


def test_a_chain_is_not_searched() -> None:
    plan = compiled(layers(8), 4).plan
    assert plan.step is not None
    assert (plan.step.compared, plan.step.seconds) == (1, plan.step.first_seconds)
    assert plan.step.lower_bound > plan.step.seconds * 0.8


def test_the_joint_choice_is_no_longer_than_the_least_bottleneck(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = compiled(Towers(3), 4, schedule="auto").plan
    monkeypatch.setattr("pipecompile.planning.candidate_evaluation.shorten_step", lambda graph, draft, *rest: draft)
    without = compiled(Towers(3), 4, schedule="auto").plan
    assert chosen.considered is not None
    assert without.considered is not None
    assert chosen.considered.best.seconds <= without.considered.best.seconds  # type: ignore[operator]
    assert chosen.step is not None
    assert chosen.step.seconds == chosen.considered.best.seconds


def test_a_pipeline_of_forwards_has_the_bound_of_forwards() -> None:
    plan = compiled(Towers(3), 4, schedule="forward").plan
    assert plan.step is not None
    assert plan.step.lower_bound <= plan.step.seconds


def test_stages_without_operations_are_warned_of() -> None:
    def far_apart(**keywords: Any) -> pc.Pipeline:
        return compiled(layers(4), 4, bandwidth=1e3, **keywords)

    with pytest.warns(pc.PartitionWarning, match="of 4 have no operations") as caught:
        far_apart()
    assert "n_stages=1 leaves no device without work" in str(caught[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error", pc.PartitionWarning)
        far_apart(balance=[1, 1, 1, 1])
