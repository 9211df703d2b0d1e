"""The pipeline of a layout: what is added for rounds that are not simulated, what the planner says of the same pipeline."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import pipecompile as pc
from pipecompile.costs import analytic_costs
from pipecompile.layouts import pipeline_step
from pipecompile.layouts.estimate import LayoutEstimator
from pipecompile.layouts.hardware import Cluster
from pipecompile.layouts.pipeline_step import PipelineModel, PipelinePoint
from pipecompile.simulation.gradient_reductions import reduced_makespan

CLUSTER = Cluster(device="h100", efficiency=0.5)


@pytest.fixture(scope="module")
def pipelines() -> PipelineModel:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(256 + 64 * (i % 3), 256 + 64 * ((i + 1) % 3)) for i in range(12)))
    return LayoutEstimator.of(model, CLUSTER, (torch.empty(64, 256, device="meta"),)).pipelines


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zb-h1", "zbv", "interleaved-zb", "v-half"])
@pytest.mark.parametrize("count", [40, 61])
def test_rounds_that_are_added_are_those_of_a_whole_simulation(
    pipelines: PipelineModel, schedule: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Transfers take as long as kernels here, where orders repeat themselves least exactly."""
    chunks = 1 if schedule in ("1f1b", "zb-h1") else 2
    point = PipelinePoint(4, schedule, 8, count, chunks)
    flags = (False, True) * (point.n_stages // 2)
    added = replace(pipelines, _simulated={})._simulate(point, flags, 1e9)
    assert point.simulated[1] < count
    monkeypatch.setattr(pipeline_step, "_ROUNDS", 1000)
    assert point.simulated == (count, count)
    whole = replace(pipelines, _drafts={}, _simulated={})._simulate(point, flags, 1e9)
    assert added.seconds == pytest.approx(whole.seconds, rel=6e-3)
    assert added.complete == pytest.approx(whole.complete, rel=6e-3)


def test_the_step_is_that_of_compile_under_the_same_costs() -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(8)))
    x = torch.empty(64, 256, device="meta")
    pipelines = LayoutEstimator.of(model, replace(CLUSTER, efficiency=1.0), (x,)).pipelines
    point = PipelinePoint(4, "1f1b", 8, 8)
    ours = pipelines.simulate(point, (False,) * 4, CLUSTER.spec.link_bandwidth)

    def costs(graph: torch.fx.GraphModule, inputs: object) -> object:
        return analytic_costs(graph, inputs, device="h100")  # type: ignore[arg-type]

    bandwidth = CLUSTER.spec.link_bandwidth
    pipe = pc.compile(
        model,
        4,
        example_args=(x,),
        n_microbatches=8,
        costs=costs,
        bandwidth=bandwidth,
        devices=["cpu"] * 4,
        check=False,
    )  # type: ignore[arg-type]
    times = {name: getattr(pipe.plan.stages[0], name) for name in ("forward", "backward")}
    stages = pipelines.draft(point).stages
    assert {name: getattr(stages[0], name) for name in times} == pytest.approx(times)
    theirs = pc.simulate(
        pipe.schedule, routes=pipe.plan.routes, latency=CLUSTER.spec.link_latency, bandwidth=bandwidth,
        forward=[s.forward for s in pipe.plan.stages], input_grad=[s.input_grad for s in pipe.plan.stages],
        weight_grad=[s.weight_grad for s in pipe.plan.stages], backward=[s.backward for s in pipe.plan.stages],
    )  # fmt: skip
    assert ours.seconds == pytest.approx(theirs.makespan)
    assert reduced_makespan(ours.complete, (0, 1, 2, 3), [0.0] * 4) <= ours.seconds


def test_recomputation_takes_time_and_saves_memory(pipelines: PipelineModel) -> None:
    point = PipelinePoint(4, "1f1b", 8, 8)
    none, every = (False,) * 4, (True,) * 4
    assert pipelines.simulate(point, every, 1e12).seconds > pipelines.simulate(point, none, 1e12).seconds
    assert pipelines.activations(point, every)[0] < pipelines.activations(point, none)[0]


def test_no_step_is_below_its_bound_and_a_higher_efficiency_is_faster(pipelines: PipelineModel) -> None:
    for schedule, chunks in (("1f1b", 1), ("interleaved", 2), ("zb-h1", 1)):
        point = PipelinePoint(4, schedule, 8, 8, chunks)
        flags = (False,) * point.n_stages
        seconds = pipelines.simulate(point, flags, 1e12).seconds
        assert pipelines.lower_bound(point) <= seconds
        faster = pipelines.at_efficiency(1.0)
        assert faster.cut(point) is pipelines.cut(point)
        assert faster.simulate(point, flags, 1e15).seconds < seconds
