"""Cuts on another recording of the same model."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pipecompile.errors import PlanError, VerifyError
from pipecompile.graph.colocation import compute_nodes, note_ties
from pipecompile.graph.cut_transfer import Cut, transfer_cut, verify_exact_cut
from pipecompile.tracing import trace
from pipecompile.tracing.traced_graph import TracedGraph


class Loop(nn.Module):
    """One cell per time step, then a head."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = x[:, 0]
        for step in range(x.shape[1]):
            state = self.cell(state + x[:, step])
        return self.head(state)


def recorded(steps: int) -> TracedGraph:
    return note_ties(trace(Loop(), torch.randn(3, steps, 4)))


def names(graph: TracedGraph) -> list[str]:
    return [node.name for node in compute_nodes(graph)]


def cells(stage_of: dict[str, int]) -> list[int]:
    return [stage for name, stage in stage_of.items() if name.startswith("cell")]


def test_a_longer_loop_is_cut_in_proportion() -> None:
    short, long = recorded(4), recorded(6)
    seen = 0
    stage_of = {}
    for name in names(short):
        seen += name.startswith("cell")
        stage_of[name] = int(seen > 2)
    carried = Cut.of(short, stage_of, 2).on(long)
    assert carried is not None
    assert cells(carried) == [0, 0, 0, 1, 1, 1]
    assert carried["head"] == 1


def test_the_same_recording_gets_the_same_cut() -> None:
    graph = recorded(4)
    stage_of = {name: int(index > 5) for index, name in enumerate(names(graph))}
    assert Cut.of(graph, stage_of, 2).on(graph) == stage_of


def test_a_cut_of_another_model_is_not_transferred() -> None:
    other = note_ties(trace(nn.Sequential(nn.Conv1d(3, 3, 1), nn.ReLU()), torch.randn(2, 3, 4)))
    assert Cut.of(other, dict.fromkeys(names(other), 0), 1).on(recorded(2)) is None


def test_a_new_node_follows_its_inputs() -> None:
    graph = recorded(2)
    known = dict.fromkeys(names(graph), 1) | dict.fromkeys(names(graph)[:2], 0)
    del known["head"]
    assert transfer_cut(known, graph, 2)["head"] == 1


def test_a_plan_without_half_of_the_nodes_is_for_another_model() -> None:
    with pytest.raises(PlanError, match="the plan is for another model"):
        transfer_cut({"head": 0}, recorded(4), 2)


def test_an_exact_cut_is_verified() -> None:
    graph = recorded(2)
    stage_of = dict.fromkeys(names(graph), 0) | {"head": 1}
    verify_exact_cut(stage_of, graph, 2)
    with pytest.raises(PlanError, match="does not cover the graph"):
        verify_exact_cut({**stage_of, "more": 1}, graph, 2)
    with pytest.raises(VerifyError):
        verify_exact_cut({**stage_of, names(graph)[0]: 1}, graph, 2)
