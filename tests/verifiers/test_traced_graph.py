"""A traced graph is legal as recorded, and every damage to it is named."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pipecompile.errors import VerifyError
from pipecompile.graph.colocation import ties_of
from pipecompile.graph.prepare import prepare
from pipecompile.tracing import trace
from pipecompile.tracing.node_facts import note
from pipecompile.verifiers.traced_graph import verify_graph
from tests.support.models import UNet


def test_a_recording_is_legal_and_its_ties_are_noted() -> None:
    graph = prepare(trace(UNet(), torch.randn(2, 3, 16, 16)))
    verify_graph(graph)
    assert graph.facts.ties is not None
    assert any({"down_0_norm1", "down_0_relu"} <= set(group) for group in ties_of(graph).groups)


def test_all_damages_are_named_at_once() -> None:
    graph = trace(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), torch.randn(2, 4))
    first, second = [node for node in graph.graph.nodes if node.op == "call_module"]
    first.meta.clear()
    note(second, ambient=None)
    second.target = "nowhere"
    with pytest.raises(VerifyError) as caught:
        verify_graph(graph)
    text = str(caught.value)
    assert len(caught.value.faults) == 3
    for word in ("has no facts", "has no modes", "nowhere"):
        assert word in text


def test_the_change_is_dumped_on_request() -> None:
    said: list[str] = []
    prepare(trace(nn.Linear(4, 4), torch.randn(2, 4)), dump=said.append)
    assert said
    assert said[0].startswith("== aliasing")
