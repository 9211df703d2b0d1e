"""The cost of a node: W has half of a backward of which nothing else is known; of a stage, what leads to no input that needs a gradient."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import pipecompile as pc
from pipecompile.costs import CostError, NodeCost
from pipecompile.costs.device_specs import Links
from pipecompile.costs.node_cost import WeightGradCost, nodes_needing_grad, weight_grad_cost
from pipecompile.errors import PipecompileError
from pipecompile.graph.colocation import compute_nodes
from pipecompile.ir.plan import StageSummary
from pipecompile.planning.schedule_choice import simulation_costs


@pytest.mark.parametrize(("weight", "expected"), [(None, 1.5), (0.0, 0.0), (2.0, 2.0)])
def test_w_has_its_known_part_of_the_backward_or_half(weight: float | None, expected: float) -> None:
    assert NodeCost(1.0, 3.0, 0, 0, weight=weight).weight_grad == expected


def test_an_error_of_a_cost_is_an_error_of_the_library() -> None:
    assert issubclass(CostError, PipecompileError)
    assert "\n" not in repr(NodeCost(1.0, 3.0, 8, 16))


class Branches(nn.Module):
    """`a` and `b` in a line, `c` joins it, `d` is a head of its own on the image."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.b(self.a(x)) + self.c(x), self.d(x)


def test_w_has_what_is_for_weights_and_all_that_leads_nowhere() -> None:
    graph = pc.trace(Branches(), torch.randn(2, 4))
    nodes = {node.name: node for node in compute_nodes(graph)}
    assert set(nodes) == {"a", "b", "c", "d", "add"}
    costs = {name: NodeCost(1.0, 10.0, 3, 100, weight=4.0 if name in "abcd" else 0.0, dividing=0.5) for name in nodes}
    wants = nodes_needing_grad(graph)
    assert {node.name for node in wants} >= set(nodes)
    assert graph.graph.find_nodes(op="placeholder")[0] not in wants
    order = list(nodes.values())
    assert weight_grad_cost(order, costs, wants) == WeightGradCost(
        50, 0, 5 * 3
    )  # a first stage: nobody waits for any gradient
    second = [node for node in order if node.name != "a"]
    assert weight_grad_cost(second, costs, wants) == WeightGradCost(
        4 + 10, 0.5, 3 + 100
    )  # of b; c comes along with add; d is not on the way


def test_frozen_layers_want_nothing() -> None:
    model = nn.Sequential(nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 4))
    graph = pc.trace(model, torch.randn(2, 4))
    first, second = compute_nodes(graph)
    wants = nodes_needing_grad(graph)
    assert first not in wants
    costs = {first.name: NodeCost(1.0, 0.0, 0, 0), second.name: NodeCost(1.0, 2.0, 0, 0)}
    assert weight_grad_cost([second], costs, wants).seconds == 2.0


def test_half_of_the_backward_is_ws_when_nobody_knows() -> None:
    stage = StageSummary(0, "cpu", "a", "b", 1, 1, 4.0, 1.0, 3.0, 0.0, 0.0, 0, 0)
    assert (stage.input_grad, stage.weight_grad, NodeCost(1.0, 3.0, 0, 0).weight_grad) == (1.5, 1.5, 1.5)


def test_a_first_stage_is_predicted_to_do_everything_in_w() -> None:
    model = nn.Sequential(*(nn.Linear(128, 128) for _ in range(4)))
    pipe = pc.compile(
        model, 2, example_args=(torch.randn(1024, 128),), loss_fn=torch.Tensor.sum, schedule="zb-h1", cost="profile"
    )
    first, second = pipe.plan.stages
    assert first.input_grad == 0 < first.weight_grad
    assert 0 < second.input_grad < second.backward + second.dividing, "W takes a part of the backward"


def test_a_backward_that_is_not_divided_takes_what_dividing_costs_less() -> None:
    stage = StageSummary(0, "cpu", "a", "b", 1, 1, 4.0, 1.0, 3.0, 0.0, 0.0, 0, 0, weight=2.0, dividing=0.5)
    costs = simulation_costs([stage, replace(stage, stage=1)], (), Links(0.0, 0.0), None)
    costs["transfer"] = 0.0  # of the routes that there are not
    assert (stage.input_grad, stage.weight_grad) == (1.5, 2.0)
    spans = {
        name: {s.name: s.end - s.start for s in pc.simulate(pc.build_schedule(name, 2, 1), **costs).spans}
        for name in ("gpipe", "zb-h1")
    }
    assert spans["gpipe"]["1B0"] == pytest.approx(3.0)
    assert [spans["zb-h1"][name] for name in ("1I0", "1W0")] == pytest.approx([1.5, 2.0])
