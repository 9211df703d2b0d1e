"""Names of modules, resolved to nodes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, fx, nn

from pipecompile.errors import InputError
from pipecompile.graph.colocation import compute_nodes
from pipecompile.graph.module_names import held_tensors, module_of, nodes_of_module
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


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner = nn.BatchNorm1d(2), nn.ParameterDict({"scale": torch.ones(2)})

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x) * self.inner["scale"] + 1


def test_a_module_counts_its_parameters_and_buffers_an_operator_what_it_reads() -> None:
    model = Model()
    graph = fx.GraphModule(model, drawn())
    used = {node.name: held_tensors(graph, node) for node in graph.graph.nodes}
    names = {id(tensor): name for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    assert {node: [names[id(tensor)] for tensor in tensors] for node, tensors in used.items() if tensors} == {
        "norm": ["norm.weight", "norm.bias", "norm.running_mean", "norm.running_var", "norm.num_batches_tracked"],
        "mul": ["inner.scale"],
    }


def drawn() -> fx.Graph:
    """Return y = norm(x) * inner.scale + 1, written by hand."""
    graph = fx.Graph()
    normed = graph.call_module("norm", (graph.placeholder("x"),))
    product = graph.call_function(torch.mul, (normed, graph.get_attr("inner.scale")))
    graph.output(graph.call_function(torch.add, (product, 1)))
    return graph
