"""Nodes of the last stage that leave for the loss what other stages leave; `tests/distributed/left_for_loss.py` runs them on ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import pipecompile as pc
from pipecompile.graph.colocation import compute_nodes
from pipecompile.graph.left_for_loss import is_for_loss, sendable, sent_to_loss
from pipecompile.graph.stages import routes, split


class Leaves(nn.Module):
    """Leaves a tensor, a dict with one, an item of a list, a count and a length."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.calls, self.seen = 0, list[Any]()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x)
        self.aux = h.square().mean()
        self.info = {"h": h.tanh()}
        self.seen.append(h.exp())
        self.calls += 1
        self.late = self.b(h).mean()
        return self.c(self.b(h).relu())


@pytest.fixture
def cut() -> tuple[Any, dict[str, int]]:
    """A graph, and a cut before the last layer."""
    graph = pc.trace(Leaves(), torch.randn(2, 4))
    return graph, {node.name: int(node.name == "c") for node in compute_nodes(graph)}


def test_tensors_in_attributes_are_left_by_the_last_stage_as_well(cut: tuple[Any, dict[str, int]]) -> None:
    graph, stage_of = cut
    found = sent_to_loss(graph, stage_of, 1, sendable(graph))
    added = [node for node in compute_nodes(graph) if is_for_loss(node)]
    assert sorted(node.target.place.key for node in added) == ["aux", "info", "late"]
    assert {found[node.name] for node in added} == {1}
    assert {name: stage for name, stage in found.items() if name in stage_of} == stage_of


def test_their_values_have_routes_with_gradients_and_the_stage_writes_them(cut: tuple[Any, dict[str, int]]) -> None:
    graph, stage_of = cut
    before = {route.value for route in routes(graph, stage_of)}
    found = sent_to_loss(graph, stage_of, 1, sendable(graph))
    sent = [route for route in routes(graph, found) if route.value not in before]
    assert [(route.source, route.consumers, route.gradient) for route in sent] == [(0, (1,), True)] * 3
    model = next(node for node in compute_nodes(graph) if is_for_loss(node)).target.place.route.start
    last = split(graph, routes(graph, found), found, [torch.device("cpu")] * 2)[1]
    values = {name: torch.full((2, 4), float(place)) for place, name in enumerate(last.inputs)}
    last.module(*values.values())
    assert any(model["aux"] is value for value in values.values())
    assert any(model["info"]["h"] is value for value in values.values())


def test_lists_and_counts_are_not_sent_and_nothing_twice(cut: tuple[Any, dict[str, int]]) -> None:
    graph, stage_of = cut
    first = [node.name for node in sendable(graph)]
    assert len(first) == 3
    sent_to_loss(graph, stage_of, 1, sendable(graph))
    assert [node.name for node in sendable(graph)] == first
