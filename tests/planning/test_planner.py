"""From costs to a plan: the problem that is solved, what the table says, and a plan carried to another recording."""

from __future__ import annotations

from math import inf
from typing import Any

import pytest
import torch
from torch import nn

import pipecompile as pc
from pipecompile.costs import analytic_costs
from pipecompile.costs.problem_builder import build_problem
from pipecompile.errors import PlanError, VerifyError
from pipecompile.graph.colocation import note_ties
from pipecompile.graph.cut_transfer import fingerprint, node_lines, transfer_cut
from pipecompile.graph.module_names import held_tensors
from pipecompile.partitioners import Shared, verify_problem
from tests.support.eager import square_loss
from tests.support.models import UNet


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.relu, self.b = (
            nn.Linear(8, 8),
            nn.BatchNorm1d(8),
            nn.ReLU(inplace=True),
            nn.Linear(8, 8),
        )
        self.b.weight = self.a.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.relu(self.norm(self.a(x)))) * self.a.bias


X = torch.randn(4, 8)


def test_the_problem_of_a_graph() -> None:
    graph = pc.trace(Tied(), X)
    costs = analytic_costs(graph, (X,), device="cpu")
    problem = build_problem(graph, costs, seconds_per_byte=1e-9, latency=1e-6, memory_limit=1e9, in_flight=(2.0, 1.0))
    verify_problem(problem)
    assert [node.name for node in problem.nodes] == ["a", "norm", "relu", "b", "mul"]
    assert ("norm", "relu") in problem.groups
    assert ("a", "norm") in problem.precedence
    held = {node.name: node.bytes for node in problem.nodes}
    assert held["a"] == held["mul"] == 0, "what several nodes use is shared"
    assert held["b"] == 2 * 4 * 8
    assert problem.shared == (Shared(("a", "b"), 2 * 4 * 64), Shared(("a", "mul"), 2 * 4 * 8))
    assert held["norm"] == 2 * 4 * 16 + 4 * 16 + 8, "buffers have no gradient"
    (sent,) = [tensor for tensor in problem.tensors if tensor.source == "a"]
    assert sent.consumers == ("norm",)
    assert sent.bytes == 4 * 8 * 4
    assert sent.time == pytest.approx(2 * (1e-6 + 4 * 8 * 4 * 1e-9))


def test_what_a_node_holds() -> None:
    model = Tied()
    graph = pc.trace(model, X)
    nodes = {node.name: node for node in graph.graph.nodes}
    assert held_tensors(graph, nodes["mul"])[0] is model.a.bias
    assert held_tensors(graph, nodes["b"])[0] is model.a.weight


def test_a_plan_is_balanced_and_says_so() -> None:
    x = torch.randn(4, 3, 32, 32)
    pipe = pc.compile(
        UNet(), 4, example_args=(x,), cost="analytic", n_microbatches=2, devices=["cpu"] * 4, loss_fn=square_loss
    )
    plan = pipe.plan
    loads = [stage.forward + stage.backward for stage in plan.stages]
    assert plan.bottleneck == pytest.approx(max(loads))
    assert plan.status == "optimal"
    assert 0 <= plan.gap < 1e-5
    assert sum(stage.parameters for stage in plan.stages) == sum(p.numel() for p in pipe.parameters())
    assert sum(stage.skips_in for stage in plan.stages) == sum(stage.skips_out for stage in plan.stages) > 0
    assert pc.Plan.from_json(plan.to_json()) == plan
    for word in ("stage", "bottleneck", "optimal", "bubble"):
        assert word in str(pipe)


def test_fingerprints_tell_graphs_apart() -> None:
    whole, part, other = (
        node_lines(pc.trace(*pair)) for pair in ((Tied(), X), (Tied(), X[:2]), (nn.Sequential(nn.Linear(8, 8)), X))
    )
    assert fingerprint(whole) == fingerprint(part) != fingerprint(other)


def test_a_cut_is_carried_by_name_and_made_legal() -> None:
    graph = note_ties(pc.trace(Tied(), X))
    known = {"a": 0, "norm": 0, "relu": 1, "b": 0}
    assert transfer_cut(known, graph, 2) == {"a": 0, "norm": 0, "relu": 1, "b": 1, "mul": 1}
    with pytest.raises(PlanError, match="another model"):
        transfer_cut({"a": 0}, graph, 2)
    with pytest.raises(VerifyError, match="in stage 3 of 2"):
        transfer_cut(dict.fromkeys(known, 3), graph, 2)


def test_a_large_model_is_planned_without_its_weights() -> None:
    """A 7B-parameter stack on `meta`: traced, costed and cut; nothing of its 28 GB exists."""
    with torch.device("meta"):
        model = nn.Sequential(*[layer for _ in range(26) for layer in (nn.Linear(16384, 16384), nn.ReLU())])
        x = torch.empty(4, 16384)
    graph = pc.trace(model, x)
    problem = build_problem(graph, analytic_costs(graph, (x,), device="h100"))
    found = pc.partition(problem, 8)
    assert found.status == "optimal"
    assert found.bottleneck == pytest.approx(4 * sum(node.time for node in problem.nodes) / 26, rel=0.05)


def test_memory_decides_where_time_does_not() -> None:
    model = nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(4)])
    x = torch.randn(8, 64)
    free = pc.compile(model, 2, example_args=(x,), cost="analytic", devices=["cpu"] * 2, n_microbatches=4)
    assert [stage.nodes for stage in free.plan.stages] == [2, 2]
    weights, saved = 2 * 4 * 64 * 64, 4 * 2 * 64
    tight = pc.compile(
        model, 2, example_args=(x,), cost="analytic", devices=["cpu"] * 2, n_microbatches=4,
        memory_limit=[weights + 2 * saved, 3 * weights + 3 * saved + saved],  # and what it receives
    )  # fmt: skip
    assert [stage.nodes for stage in tight.plan.stages] == [1, 3]


@pytest.mark.parametrize(
    ("options", "times"),
    [({"checkpoint": "always"}, 1), ({"checkpoint": "except_last"}, 2), ({"checkpoint": "always", "restored": 2}, 2)],
    ids=str,
)
def test_a_stage_that_recomputes_holds_what_it_saves_once_for_each_that_it_restored(
    options: dict[str, Any], times: int
) -> None:
    model = nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.ReLU())])
    pipe = pc.compile(
        model, 2, example_args=(torch.randn(32, 64),), n_microbatches=8, schedule="gpipe", loss_fn=torch.Tensor.mean,
        devices=["cpu"] * 2, cost="analytic", **options,
    )  # fmt: skip
    for stage, held in zip(pipe.plan.stages, pipe.simulate().peak_memory, strict=True):
        inputs = sum(way.nbytes for way in pipe.plan.routes if stage.stage in way.consumers and way.source >= 0)
        assert stage.memory - stage.state_bytes == times * stage.saved_bytes + 8 * inputs
        assert held <= stage.memory - stage.state_bytes + (32 + 2 * 4) * 64 * 4  # the mini-batch, what comes and goes


@pytest.mark.parametrize("limit", [inf, [inf, 1e9], [inf, inf]])
def test_an_infinite_memory_limit_is_none(limit: float | list[float]) -> None:
    model, x = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))), torch.randn(8, 8)
    options = {"example_args": (x,), "loss_fn": torch.sum, "cost": "analytic", "devices": ["cpu"] * 2}
    limited, unlimited = (pc.compile(model, 2, memory_limit=each, **options) for each in (limit, None))
    assert limited.plan.stage_of == unlimited.plan.stage_of
