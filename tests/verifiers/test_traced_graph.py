"""A traced graph is legal as recorded, and every damage to it is named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn

from pipecompile.errors import VerifyError
from pipecompile.graph.colocation import note_ties, ties_of
from pipecompile.tracing import trace
from pipecompile.tracing.graph_facts import Ties
from pipecompile.tracing.node_facts import Role, note
from pipecompile.tracing.traced_graph import TracedGraph
from pipecompile.verifiers.traced_graph import graph_faults, verify_graph
from tests.support.models import UNet


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


def graph_of_two() -> TracedGraph:
    return trace(Two(), torch.randn(2, 4))


def test_a_recording_is_legal_and_its_ties_are_noted() -> None:
    graph = note_ties(trace(UNet(), torch.randn(2, 3, 16, 16)))
    verify_graph(graph)
    assert graph.facts.ties is not None
    assert any({"down_0_norm1", "down_0_relu"} <= set(group) for group in ties_of(graph).groups)


def test_all_damages_are_named_at_once() -> None:
    graph = graph_of_two()
    first, second = [node for node in graph.graph.nodes if node.op == "call_module"]
    first.meta.clear()
    note(second, ambient=None)
    second.target = "nowhere"
    with pytest.raises(VerifyError) as caught:
        verify_graph(graph)
    faults = caught.value.faults
    assert len(faults) == 3
    assert faults[0].startswith("node first (call_module first): has no facts")
    assert all("test_traced_graph.py:" in fault and "Two.forward" in fault for fault in faults[1:])
    assert faults[1].endswith("has no modes (grad mode and autocast)")
    assert faults[2].endswith("the graph has no module nowhere")


def moved_up(graph: TracedGraph) -> None:
    first, second = [node for node in graph.graph.nodes if node.op == "call_module"]
    first.prepend(second)


def without_input(graph: TracedGraph) -> None:
    graph.facts = replace(graph.facts, names=())


def with_a_far_batch(graph: TracedGraph) -> None:
    graph.facts = replace(graph.facts, dims=(5,))


def with_two_outputs(graph: TracedGraph) -> None:
    output = graph.graph.output_node()
    output.args = ((*output.args[0], output.args[0][0]),)


def with_a_tie_to_nothing(graph: TracedGraph) -> None:
    graph.facts = replace(graph.facts, ties=Ties((("first", "gone"),), ()))


def with_two_batch_sizes(graph: TracedGraph) -> None:
    for node in list(graph.graph.nodes)[1:3]:
        note(node, role=Role.BATCH_SIZE)


def with_equal_names(graph: TracedGraph) -> None:
    list(graph.graph.nodes)[2].name = "first"


@pytest.mark.parametrize(
    ("damage", "fault"),
    [
        (moved_up, "uses first, which is not above the node"),
        (without_input, "inputs: 0 names, expected 1, one per placeholder"),
        (with_a_far_batch, "has no dimension 5 for the batch"),
        (with_two_outputs, "output: 2 values, expected 1, one per leaf of out_spec"),
        (with_a_tie_to_nothing, "ties: gone is not in the graph"),
        (with_two_batch_sizes, "2 nodes read the batch size, expected at most 1: first, second"),
        (with_equal_names, "a node above has the same name"),
    ],
)
def test_each_damage_is_the_one_fault(damage: Callable[[TracedGraph], None], fault: str) -> None:
    graph = graph_of_two()
    assert graph_faults(graph) == []
    damage(graph)
    (found,) = graph_faults(graph)
    assert fault in found
