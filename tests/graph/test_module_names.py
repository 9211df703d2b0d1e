"""Names of modules, resolved to nodes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pipecompile.errors import InputError
from pipecompile.graph.colocation import compute_nodes
from pipecompile.graph.module_names import module_of, nodes_of_module
from pipecompile.tracing import trace
from pipecompile.tracing.traced_graph import TracedGraph


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(x) + 1


@pytest.fixture
def graph() -> TracedGraph:
    return trace(nn.Sequential(Block(), Block()), torch.randn(3, 4))


def test_a_module_has_its_calls_and_those_inside(graph: TracedGraph) -> None:
    assert nodes_of_module(graph, "0", "pin") == ["_0_fc", "_0_add"]
    assert nodes_of_module(graph, "1.fc", "pin") == ["_1_fc"]


def test_a_node_is_found_by_its_own_name(graph: TracedGraph) -> None:
    assert nodes_of_module(graph, "_0_add", "pin") == ["_0_add"]


def test_the_module_of_a_call(graph: TracedGraph) -> None:
    assert [module_of(node) for node in compute_nodes(graph)] == ["0.fc", "0", "1.fc", "1"]


def test_an_unknown_name_is_refused_with_the_nearest(graph: TracedGraph) -> None:
    with pytest.raises(InputError, match=r"pin: no module or node of the graph is called '0\.fd'") as caught:
        nodes_of_module(graph, "0.fd", "pin")
    assert "'0.fc'" in caught.value.hint
