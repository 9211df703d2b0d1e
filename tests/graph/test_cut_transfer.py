"""Cuts on another recording of the same model."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pipecompile.errors import PlanError, VerifyError
from pipecompile.graph.colocation import compute_nodes, note_ties
from pipecompile.graph.cut_transfer import (
    Cut,
    check_fingerprint,
    fingerprint,
    node_lines,
    transfer_cut,
    verify_exact_cut,
)
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


def lines_of(model: nn.Module, samples: int = 3) -> tuple[str, ...]:
    return node_lines(trace(model, torch.randn(samples, 4)))


def test_a_line_has_name_operation_and_inputs() -> None:
    lines = lines_of(nn.Sequential(nn.Linear(4, 2), nn.ReLU()))
    assert lines[1:3] == ("_0 = call_module 0(input_1)", "_1 = call_module 1(_0)") or lines[1].startswith(
        "_0 = call_module 0("
    )


def test_shapes_do_not_count_and_calls_do() -> None:
    small, wide = nn.Sequential(nn.Linear(4, 2), nn.ReLU()), nn.Sequential(nn.Linear(4, 8), nn.ReLU())
    assert fingerprint(lines_of(small)) == fingerprint(lines_of(wide, samples=5))
    assert fingerprint(lines_of(small)) != fingerprint(lines_of(nn.Sequential(nn.Linear(4, 2))))
    assert len(fingerprint(())) == 16


def test_a_plan_for_another_graph_is_refused_with_the_first_differences() -> None:
    planned = lines_of(nn.Sequential(nn.Linear(4, 2), nn.ReLU()))
    graph = trace(nn.Sequential(nn.Linear(4, 2)), torch.randn(3, 4))
    check_fingerprint(node_lines(graph), fingerprint(node_lines(graph)), graph)
    with pytest.raises(PlanError) as caught:
        check_fingerprint(planned, fingerprint(planned), graph)
    assert "2 of 4 nodes differ" in str(caught.value)
    assert "node 2: the plan has _1 = call_module 1(_0)" in caught.value.where
    assert "the model no node" in caught.value.where
