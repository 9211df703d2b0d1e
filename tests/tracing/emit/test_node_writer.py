"""Nodes of recorded calls: names, facts and bound results."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import fx, nn

from pipecompile.errors import RecordingWarning
from pipecompile.torch_private.modes import FakeTensorMode
from pipecompile.tracing import trace
from pipecompile.tracing.ambient_modes import Ambient
from pipecompile.tracing.emit.node_writer import NodeWriter, Regions
from pipecompile.tracing.emit.value_nodes import ValueNodes, storages
from pipecompile.tracing.fakes.batch_symbol import BatchSymbol
from pipecompile.tracing.fakes.fake_tensors import Twins
from pipecompile.tracing.node_facts import facts, value_of
from pipecompile.tracing.recording import Recorder

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


class Frozen(nn.Module):
    """Its first layer runs without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            x = self.first(x)
        return self.second(x)


def names_of(graph: fx.Graph) -> list[str]:
    return [getattr(node.target, "__name__", "") for node in graph.nodes]


def recorders() -> list[Recorder]:
    return [alive for alive in gc.get_objects() if type(alive) is Recorder]


def modes(*, grad: bool = True, dtype: str | None = None, nesting: int = 0) -> Ambient:
    return Ambient(grad, (("cpu", dtype, True),), nesting)


def test_nothing_is_emitted_while_the_modes_stay() -> None:
    graph = fx.Graph()
    regions = Regions(graph, modes())
    regions.enter(modes())
    regions.close()
    assert not list(graph.nodes)


def test_grad_mode_goes_off_and_back_to_the_callers() -> None:
    graph = fx.Graph()
    regions = Regions(graph, modes())
    regions.enter(modes(grad=False))
    regions.close()
    before, off, back = graph.nodes
    assert names_of(graph) == ["enabled", "_set_grad_enabled", "_set_grad_enabled"]
    assert (off.args, back.args) == ((False,), (before,))


def test_autocast_is_entered_once_per_region_and_left_before_the_next() -> None:
    graph = fx.Graph()
    regions = Regions(graph, modes())
    regions.enter(modes(dtype="bfloat16", nesting=1))
    regions.enter(modes(dtype="bfloat16", nesting=1))
    regions.enter(modes(dtype="float16", nesting=1))
    regions.close()
    assert names_of(graph) == ["_enter_autocast", "_exit_autocast", "_enter_autocast", "_exit_autocast"]
    first, left, second, last = graph.nodes
    assert (first.args[1], second.args[1]) == (torch.bfloat16, torch.float16)
    assert (left.args, last.args) == ((first,), (second,))


def test_a_nested_region_is_left_alone() -> None:
    graph = fx.Graph()
    regions = Regions(graph, modes())
    regions.enter(modes(dtype="bfloat16", nesting=1))
    regions.enter(modes(nesting=2))
    regions.enter(modes(dtype="bfloat16", nesting=1))
    regions.close()
    assert names_of(graph) == ["_enter_autocast", "_enter_autocast", "_exit_autocast", "_exit_autocast"]


def test_a_graph_with_regions_does_not_keep_its_recorder_alive() -> None:
    """Until 2026-11 the graph called the function that stands in for `torch.is_grad_enabled` while a model is recorded."""
    before = {id(recorder) for recorder in recorders()}
    graph = trace(Frozen(), torch.randn(3, 4))
    gc.collect()
    assert {id(recorder) for recorder in recorders()} <= before
    assert "<locals>" not in str(graph)
    out = graph(torch.randn(2, 4))
    assert out.requires_grad
    assert torch.is_grad_enabled()


def test_a_hook_that_each_forward_registers_on_a_parameter_gets_a_warning() -> None:
    class Registers(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.weight.register_hook(lambda g: g * 2)
            return super().forward(x)

    with pytest.warns(RecordingWarning, match=r"forward registers a hook on a parameter.* \(.*test_node_writer.py"):
        trace(Registers(4, 4), torch.randn(2, 4))
