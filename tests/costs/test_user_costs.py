"""Costs of the user: seconds of a module are distributed over its nodes; a function must cover every node."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import pipecompile as pc
from pipecompile.costs import NodeCost
from pipecompile.costs.user_costs import costs_from_provider, with_user_costs
from pipecompile.errors import InputError
from pipecompile.graph.colocation import compute_nodes
from pipecompile.tracing.traced_graph import TracedGraph

COST = NodeCost(1.0, 3.0, 8, 16, spread=0.5, weight=2.0, dividing=0.25)


@pytest.fixture
def graph() -> TracedGraph:
    return pc.trace(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), torch.randn(2, 4))


@pytest.fixture
def names(graph: TracedGraph) -> list[str]:
    return [node.name for node in compute_nodes(graph)]


def test_seconds_of_a_module_scale_all_times_of_its_nodes(graph: TracedGraph, names: list[str]) -> None:
    costs = with_user_costs(graph, dict.fromkeys(names, COST), {"0": 8.0})
    assert costs[names[0]] == NodeCost(2.0, 6.0, 8, 16, spread=0.0, weight=4.0, dividing=0.5)
    assert costs[names[1]] == COST


def test_of_a_node_without_a_time_the_backward_takes_twice_the_forward(graph: TracedGraph, names: list[str]) -> None:
    costs = with_user_costs(graph, dict.fromkeys(names, NodeCost(0.0, 0.0, 8, 16)), {"1": 3.0})
    assert (costs[names[1]].forward, costs[names[1]].backward, costs[names[1]].weight) == (1.0, 2.0, None)


@pytest.mark.parametrize("seconds", [-1.0, float("inf"), float("nan"), True, "fast"])
def test_a_time_that_is_none_is_refused(graph: TracedGraph, names: list[str], seconds: object) -> None:
    with pytest.raises(InputError, match=r"costs: '0' takes .* seconds\n  try    pass seconds .*costs=\{'0': 0.01\}"):
        with_user_costs(graph, dict.fromkeys(names, COST), {"0": seconds})


def test_a_function_must_cover_every_node(graph: TracedGraph, names: list[str]) -> None:
    complete = dict.fromkeys(names, COST)
    assert costs_from_provider(graph, (), lambda *_: complete) == complete
    with pytest.raises(InputError, match=f"returned no NodeCost for 1 node\n  where  {names[1]}"):
        costs_from_provider(graph, (), lambda *_: {names[0]: COST})


@pytest.mark.parametrize("value", [float("nan"), -1.0, float("inf"), 1e308, "a", None, True])
@pytest.mark.parametrize("field", ["forward", "backward", "saved_bytes", "output_bytes", "flops"])
def test_a_number_that_is_none_is_refused_by_node_and_field(
    graph: TracedGraph, names: list[str], field: str, value: object
) -> None:
    costs = {name: replace(COST, **{field: value}) for name in names}  # type: ignore[arg-type]
    with pytest.raises(InputError, match=rf"costs\['{names[0]}'\]\.{field}=.* is (not|more)"):
        costs_from_provider(graph, (), lambda *_: costs)


def test_numbers_of_numpy_become_those_of_python(graph: TracedGraph, names: list[str]) -> None:
    own = dict.fromkeys(names, replace(COST, forward=np.float32(1.0), saved_bytes=np.int64(8)))
    found = costs_from_provider(graph, (), lambda *_: own)[names[0]]
    assert (found, type(found.forward), type(found.saved_bytes)) == (COST, float, int)
