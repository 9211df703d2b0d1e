"""Nodes of recorded calls: names, facts and bound results."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from pipecompile.torch_private.modes import FakeTensorMode
from pipecompile.tracing.ambient_modes import Ambient
from pipecompile.tracing.emit.ambient_regions import Regions
from pipecompile.tracing.emit.node_writer import NodeWriter
from pipecompile.tracing.emit.value_nodes import ValueNodes, storages
from pipecompile.tracing.fakes.batch_symbol import BatchSymbol
from pipecompile.tracing.fakes.fake_tensors import Twins
from pipecompile.tracing.node_facts import facts, value_of

HERE = Ambient.now()


@pytest.fixture
def writer() -> NodeWriter:
    symbol, graph = BatchSymbol(3), fx.Graph()
    fake = FakeTensorMode(shape_env=symbol.env, allow_non_fake_inputs=True)
    return NodeWriter(ValueNodes(graph, symbol, Twins(fake, torch.device("cpu"))), Regions(graph, HERE))


def fake(writer: NodeWriter) -> torch.Tensor:
    with writer.values.twins.fake:
        return torch.empty(3, 4)


def test_a_node_is_named_by_its_module_and_its_word(writer: NodeWriter) -> None:
    writer.path.append("layer.0")
    node = writer.write(("call_function", torch.zeros, (3, 4)), {}, fake(writer), HERE)
    module = writer.write(("call_module", "layer.0.norm", ()), {}, fake(writer), HERE)
    assert (node.name, module.name) == ("layer_0_zeros", "layer_0_norm")
    assert facts(node).module == "layer.0"
    assert "test_node_writer.py:" in facts(node).source


def test_the_result_stands_for_the_node_from_then_on(writer: NodeWriter) -> None:
    value = fake(writer)
    node = writer.write(("call_function", torch.zeros, (3, 4)), {}, value, HERE)
    user = writer.write(("call_method", "relu", (value,)), {}, fake(writer), HERE)
    assert user.args == (node,)
    assert value_of(node) is value
    assert facts(node).storages == storages([value])


def test_writes_reads_and_draws_are_noted_and_not_inherited_by_items(writer: NodeWriter) -> None:
    value, other = fake(writer), fake(writer)
    node = writer.write(
        ("call_function", torch.max, ()), {}, (value, other), HERE,
        changed=[value], exchanged=storages([other]), held=[other], draws=True, seeds=True,
    )  # fmt: skip
    assert facts(node).mutates == storages([value, other])
    assert (facts(node).reads, facts(node).draws, facts(node).seeds) == (storages([other]), True, True)
    item = writer.values.node(value)
    assert item.args == (node, 0)
    assert (facts(item).mutates, facts(item).reads, facts(item).draws, facts(item).seeds) == (
        set(),
        set(),
        False,
        False,
    )


def test_a_call_under_no_grad_stands_behind_a_switch(writer: NodeWriter) -> None:
    writer.write(
        ("call_function", torch.zeros, (3, 4)), {}, fake(writer), Ambient(not HERE.grad, HERE.autocast, HERE.nesting)
    )
    assert [node.name for node in writer.values.graph.nodes] == ["enabled", "_set_grad_enabled", "zeros"]
