"""Fingerprints of graphs."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pipecompile.errors import PlanError
from pipecompile.graph.fingerprint import check_fingerprint, fingerprint, node_lines
from pipecompile.tracing import trace


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
