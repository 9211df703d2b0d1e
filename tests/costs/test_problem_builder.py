"""Two branches of a traced graph as a partition problem: times, bytes, edges and shared parameters."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import pipecompile as pc
from pipecompile.costs import NodeCost
from pipecompile.costs.problem_builder import build_problem
from pipecompile.graph.colocation import compute_nodes


class Branches(nn.Module):
    """a and b share their weight; norm has buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False), nn.BatchNorm1d(4)
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.a(x)
        return self.b(hidden) + self.norm(hidden)


def problem(**options: object) -> pc.Problem:
    graph = pc.trace(Branches(), torch.randn(2, 4))
    costs = {node.name: NodeCost(1.0, 2.0, 10, 32) for node in compute_nodes(graph)}
    return build_problem(graph, costs, **options)


def test_a_node_has_the_time_of_both_directions_and_the_bytes_of_its_parameters_with_gradients() -> None:
    nodes = {node.name: node for node in problem().nodes}
    assert set(nodes) == {"a", "b", "norm", "add"}
    assert all((node.time, node.activation) == (3.0, 10) for node in nodes.values())
    assert {name: node.bytes for name, node in nodes.items()} == {
        "a": 0, "b": 0, "norm": 2 * (4 + 4) * 4 + (4 + 4) * 4 + 8, "add": 0,
    }  # fmt: skip


def test_a_tied_weight_is_shared_and_its_optimizer_state_counts() -> None:
    for copies in (0, 2):
        (shared,) = problem(optimizer_state=copies).shared
        assert (shared.nodes, shared.bytes) == (("a", "b"), 64 * (2 + copies))


def test_a_tensor_goes_to_each_consumer_once_and_its_gradient_returns() -> None:
    tensors = {tensor.source: tensor for tensor in problem(seconds_per_byte=0.5, latency=3.0).tensors}
    assert tensors["a"].consumers == ("b", "norm")
    assert (tensors["a"].time, tensors["a"].bytes) == (pytest.approx(2 * (3.0 + 16.0)), 32.0)
    assert "add" not in tensors


def test_recomputed_stages_hold_the_activations_of_all_restored_micro_batches() -> None:
    assert {node.activation for node in problem(restored=3).nodes} == {30}


def test_limits_are_passed_on() -> None:
    built = problem(memory_limit=[1.0, 2.0], in_flight=[2.0, 1.0])
    assert (built.memory_limit, built.in_flight) == ((1.0, 2.0), (2.0, 1.0))
    assert set(built.precedence) >= {("a", "b"), ("a", "norm"), ("b", "add"), ("norm", "add")}
