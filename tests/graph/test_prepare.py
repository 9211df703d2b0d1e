"""Passes before and after the cut."""

from __future__ import annotations

import pytest
import torch
from torch import fx, nn

from pipecompile.errors import VerifyError
from pipecompile.graph.prepare import place_on_device, prepare
from pipecompile.tracing import trace


def test_prepare_notes_the_ties_in_the_same_graph() -> None:
    graph = trace(nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True)), torch.randn(3, 4))
    assert graph.facts.ties is None
    assert prepare(graph) is graph
    assert graph.facts.ties is not None
    assert graph.facts.ties.groups == (("_0", "_1"),)


def test_prepare_refuses_a_graph_that_is_not_legal() -> None:
    graph = trace(nn.Sequential(nn.Linear(4, 4)), torch.randn(3, 4))
    next(node for node in graph.graph.nodes if node.op == "call_module").meta.clear()
    with pytest.raises(VerifyError, match="has no facts"):
        prepare(graph)


def test_a_stage_is_rewritten_for_its_device() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_method("to", (x, torch.device("cpu"))))
    device = torch.device("cuda:1")
    assert [
        node.args[1] for node in place_on_device(graph, torch.device("cpu"), device).nodes if node.op == "call_method"
    ] == [device]
