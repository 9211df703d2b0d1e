"""Parts of fx graphs without a public name."""

from __future__ import annotations

import pytest
import torch
from torch import fx, nn

from pipecompile.torch_private.fx_graphs import PyTreeCodeGen, PyTreeInfo, root_of, target_text
from pipecompile.torch_private.pytree import tree_flatten

pytestmark = pytest.mark.smoke


def test_a_node_can_be_inserted_behind_the_root() -> None:
    graph = fx.symbolic_trace(nn.ReLU()).graph
    first = next(iter(graph.nodes))
    with graph.inserting_after(root_of(graph)):
        made = graph.placeholder("before")
    assert next(iter(graph.nodes)) is made
    assert made.next is first


def test_targets_are_printed_as_in_a_graph() -> None:
    graph = fx.Graph()
    assert target_text(graph.call_function(torch.add, ())) == "torch.add"
    assert target_text(graph.call_method("relu", ())) == "relu"


def test_a_module_can_take_nested_inputs() -> None:
    graph = fx.Graph()
    a, b = graph.placeholder("a"), graph.placeholder("b")
    graph.output([graph.call_function(torch.sub, (a, b))])
    inputs, outputs = tree_flatten((({"a": 0, "b": 0},), {}))[1], tree_flatten([0])[1]
    graph.set_codegen(PyTreeCodeGen(PyTreeInfo(["pair"], inputs, outputs)))
    module = fx.GraphModule(nn.Module(), graph)
    assert module({"a": torch.tensor(3), "b": torch.tensor(1)}) == [torch.tensor(2)]
