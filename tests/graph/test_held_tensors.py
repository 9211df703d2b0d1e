"""A node uses the parameters and buffers of its module, and the attributes that it reads."""

from __future__ import annotations

import torch
from torch import Tensor, fx, nn

from pipecompile.graph.held_tensors import held_tensors


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
