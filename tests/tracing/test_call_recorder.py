"""Single calls while a model is recorded."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from torch import nn

from pipecompile.errors import TraceError
from pipecompile.tracing import trace
from pipecompile.tracing.node_facts import Role, facts
from tests.support.bodies import Body


def words(body: Callable[[torch.Tensor], object]) -> list[str]:
    nodes = trace(Body(lambda _, x: body(x)), torch.randn(3, 4, 3)).graph.nodes
    return [node.name for node in nodes if node.op.startswith("call") and facts(node).role is Role.VALUE]


def test_queries_of_metadata_are_no_nodes() -> None:
    assert words(lambda x: x.relu() if x.dim() == 3 and x.dtype == torch.float32 and x.is_contiguous() else x) == [
        "relu"
    ]


def test_iteration_is_one_unbind() -> None:
    assert words(lambda x: sum(part for part in x[0])).count("unbind") == 1


def test_calls_of_other_threads_are_not_recorded() -> None:
    def body(x: torch.Tensor) -> torch.Tensor:
        thread = threading.Thread(target=lambda: torch.ones(2).exp())
        thread.start()
        thread.join()
        return x.relu()

    assert words(body) == ["relu"]


def test_an_assertion_on_a_value_is_a_node_that_each_run_checks() -> None:
    def body(x: torch.Tensor) -> torch.Tensor:
        assert (x > -100).all()
        return x.relu()

    graph = trace(Body(lambda _, x: body(x)), torch.randn(3, 4, 3))
    assert "holds" in [node.name for node in graph.graph.nodes]
    with pytest.raises(AssertionError):
        graph(torch.full((2, 4, 3), -200.0))


def test_a_read_of_grad_is_refused_with_the_line() -> None:
    with pytest.raises(TraceError, match="PC113") as caught:
        trace(Body(lambda _, x: x if x.grad is None else x.grad), torch.randn(3, 4, 3))
    assert "test_call_recorder.py:" in str(caught.value)


def test_a_leaf_module_is_one_node_that_reads_its_parameters() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    (node,) = [node for node in trace(model, torch.randn(3, 4)).graph.nodes if node.op == "call_module"]
    assert node.target == "0"
    assert len(facts(node).reads) == 2
    assert not facts(node).mutates
