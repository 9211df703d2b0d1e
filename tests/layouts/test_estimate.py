"""plan_for: the table of a small model, what memory and links change, lines that run, and what is refused."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import pipecompile as pc
from pipecompile.costs import analytic_costs
from pipecompile.layouts import estimate

GIB = 2.0**30


def layers(count: int = 8, width: int = 512) -> nn.Sequential:
    with torch.device("meta"):
        return nn.Sequential(*(nn.Linear(width, width) for _ in range(count)))


def batch(samples: int = 64, width: int = 512) -> torch.Tensor:
    return torch.empty(samples, width, device="meta")


@pytest.fixture(scope="module")
def plan() -> pc.ClusterPlan:
    return pc.plan_for(layers(), pc.Cluster(device="h100", devices_per_node=4), example_args=(batch(),))


def test_every_layout_has_a_row_and_the_shortest_step_is_first(plan: pc.ClusterPlan) -> None:
    assert {str(row.layout) for row in plan.rows} == {
        "pp 1 x dp 4", "pp 1 x dp_shard 4", "pp 2 x dp 2", "pp 2 x dp_shard 2", "pp 4",
    }  # fmt: skip
    steps = [row.seconds.total for row in plan.rows]
    assert steps == sorted(steps)
    assert plan.best is plan.rows[0]
    for row in plan.rows:
        assert row.lower_bound <= row.seconds.total
        assert row.n_microbatches * row.samples * row.layout.replicas == 64


def test_memory_of_a_row_is_what_the_model_has(plan: pc.ClusterPlan) -> None:
    whole = sum(p.nbytes for p in layers().parameters())
    row = next(row for row in plan.rows if str(row.layout) == "pp 1 x dp 4")
    assert (row.memory.parameters, row.memory.gradients, row.memory.optimizer) == (whole, whole, 2 * whole)
    shard = next(row for row in plan.rows if str(row.layout) == "pp 1 x dp_shard 4")
    assert shard.memory.optimizer == whole / 2
    assert shard.seconds.gather > 0
    staged = next(row for row in plan.rows if str(row.layout) == "pp 4")
    assert staged.memory.parameters == pytest.approx(whole / 4)


def test_copies_wait_for_what_of_their_reduction_is_not_beside_backwards() -> None:
    slow = pc.Cluster(device="h100", devices_per_node=2, link_inside=1e9)
    rows = pc.plan_for(layers(), slow, example_args=(batch(),)).rows
    row = next(row for row in rows if str(row.layout) == "pp 1 x dp 2")
    whole = sum(p.nbytes for p in layers().parameters())
    assert row.seconds.reduction == pytest.approx(whole / 1e9 + 2 * 10e-6)  # one stage: nothing runs beside it


def test_what_does_not_fit_recomputes_or_is_last_with_what_it_lacks() -> None:
    model, x = layers(8, 512), batch(4096)
    roomy = pc.plan_for(model, pc.Cluster(device="h100", devices_per_node=2), example_args=(x,), schedules=["1f1b"])
    staged = next(row for row in roomy.rows if row.layout.pp == 2)
    assert not any(staged.recompute)
    limit = staged.memory.total - 1.0
    tight = pc.plan_for(
        model, pc.Cluster(device="h100", devices_per_node=2, memory=limit), example_args=(x,), schedules=["1f1b"]
    )
    assert tight.rows[0].fits
    assert all(row.memory.total <= limit for row in tight.rows if row.fits)
    none = pc.plan_for(model, pc.Cluster(device="h100", devices_per_node=2, memory=1e6), example_args=(x,))
    assert none.best is None
    for row in none.rows:
        assert row.missing == pytest.approx(row.memory.total - 1e6)
    assert [row.missing for row in none.rows] == sorted(row.missing for row in none.rows)


def test_one_recording_and_one_cost_walk_per_size_serve_all_layouts(monkeypatch: pytest.MonkeyPatch) -> None:
    from pipecompile.layouts import pipeline_step

    records, walks, cuts = [], [], []
    for module, name, log in ((estimate, "record", records), (pipeline_step, "node_costs", walks), (pipeline_step, "solve_cut", cuts)):  # fmt: skip
        function = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *a, f=function, log=log, **k: log.append(1) or f(*a, **k))
    pc.plan_for(layers(), "8xh100", example_args=(batch(),))
    assert (len(records), len(walks)) == (1, 4)
    assert len(cuts) == 4 + 3  # of 1, 2, 4 and 8 stages for all layouts; then of the rows' own sizes


def test_the_step_of_a_row_is_that_of_compile_where_sizes_have_other_cuts() -> None:
    """Launches make a sample's kernels alike; those of 8 samples differ. The cut of one sample is 15 % slower for 8."""
    with torch.device("meta"):
        widths = [256, 4096, 4096, 4096, 256, *[256] * 12]
        model = nn.Sequential(*(nn.Linear(a, b) for a, b in zip(widths, widths[1:], strict=False)))
    x = torch.empty(64, 64, 256, device="meta")
    cluster = pc.Cluster(device="h100", devices_per_node=4, efficiency=1.0)
    for schedule in ("1f1b", "interleaved"):
        plan = pc.plan_for(model, cluster, example_args=(x,), schedules=[schedule])
        row = next(row for row in plan.rows if row.layout.pp == 4)
        pipe = pc.compile(
            model, row.n_stages, example_args=(x,), n_microbatches=row.n_microbatches, schedule=schedule, check=False,
            costs=partial(analytic_costs, device="h100"), bandwidth=cluster.inside, devices=["cpu"] * 4, loss_fn=torch.mean,
        )  # fmt: skip
        theirs = pc.simulate(
            pipe.schedule, routes=pipe.plan.routes, latency=cluster.spec.link_latency, bandwidth=cluster.inside,
            forward=[s.forward for s in pipe.plan.stages], input_grad=[s.input_grad for s in pipe.plan.stages],
            weight_grad=[s.weight_grad for s in pipe.plan.stages], backward=[s.backward for s in pipe.plan.stages],
        )  # fmt: skip
        assert row.seconds.pipeline == pytest.approx(theirs.makespan, rel=0.01)


def test_the_line_of_a_pipeline_runs() -> None:
    x = torch.randn(8, 16)
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
    row = pc.plan_for(model, pc.Cluster(device="h100", devices_per_node=2), example_args=(x,)).rows
    line = next(each.line for each in row if each.layout.pp == 2)
    made: dict[str, Any] = {}

    class Recorded:
        @staticmethod
        def compile(model: nn.Module, n_stages: int, mesh: object, **keywords: Any) -> pc.Pipeline:
            made["mesh"] = mesh
            devices = ["cpu"] * 2
            return pc.compile(model, n_stages, devices=devices, **keywords)

    names = {
        "pc": Recorded,
        "model": model,
        "x": x,
        "loss_fn": torch.Tensor.mean,
        "init_device_mesh": lambda kind, sizes, mesh_dim_names: (sizes, mesh_dim_names),
    }
    pipe = eval(line, names)
    assert made["mesh"] == ((2,), ("pp",))
    assert math.isfinite(float(pipe.step(x)))


def test_the_lines_have_the_inputs_and_the_optimizer_of_the_plan() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x: torch.Tensor, mask: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
            return self.second(self.first(x) * mask) * scale

    cluster, inputs = pc.Cluster(device="h100", devices_per_node=2), torch.empty(8, 16)
    adam = torch.optim.AdamW(Two().parameters(), amsgrad=True)
    words = {"example_kwargs": {"mask": inputs, "scale": 2.0}, "batch_dims": {"mask": 0}}
    for optimizer, text in ((adam, "optimizer=optimizer"), (torch.optim.Adam, 'optimizer="adam"'), (None, "loss_fn")):
        line = pc.plan_for(Two(), cluster, example_args=(inputs,), optimizer=optimizer, **words).rows[0].line
        given = 'example_args=(x,), example_kwargs={"mask": mask, "scale": 2.0}, batch_dims={"mask": 0}'
        assert given in line
        assert text in line
        assert ("optimizer" in line) == (optimizer is not None)


def test_the_example_may_have_any_number_of_samples_that_a_layout_divides() -> None:
    rows = pc.plan_for(layers(), "4xh100", example_args=(batch(6),)).rows
    assert {row.layout.replicas for row in rows} == {1, 2}


def test_micro_batches_on_which_a_layer_fails_are_no_layouts() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8))
    rows = pc.plan_for(model, "2xh100", example_args=(torch.empty(16, 8),)).rows
    assert {row.layout.pp for row in rows} == {1, 2}
    assert all(row.samples > 1 for row in rows)
    with pytest.raises(pc.CostError, match="more than 1 value per channel"):
        pc.plan_for(model, "2xh100", example_args=(torch.empty(1, 8),))


@pytest.mark.parametrize(
    ("keywords", "text"),
    [
        ({"schedules": ["forward"]}, "'forward' is not known"),
        ({"schedules": []}, "is not known"),
        ({"schedules": ["1f2b"]}, "'1f2b' is not known"),
        ({"most_stages": 0}, "most_stages"),
        ({"optimizer": "adamm"}, "optimizer='adamm' is not known"),
        ({"example_args": ()}, "plan_for needs an example of a mini-batch"),
    ],
)
def test_wrong_arguments_are_refused(keywords: dict[str, Any], text: str) -> None:
    with pytest.raises(pc.PipecompileError) as caught:
        pc.plan_for(layers(), "8xh100", **({"example_args": (batch(),)} | keywords))
    assert text in str(caught.value)


def test_a_batch_that_no_layout_divides_is_refused() -> None:
    with pytest.raises(pc.InputError, match="no layout of 1 x 4 h100 divides a mini-batch of 3 samples"):
        pc.plan_for(layers(), "4xh100", example_args=(batch(3),), most_stages=2)


def test_weights_that_no_device_holds_are_known_without_a_search() -> None:
    cluster = pc.Cluster(device="h100", devices_per_node=2, memory=1.0)
    rows = pc.plan_for(layers(), cluster, example_args=(batch(),)).rows
    assert all(row.schedule == "1f1b" and row.samples == 1 for row in rows)
