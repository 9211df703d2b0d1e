from __future__ import annotations

import operator

import pytest
import torch
from torch import nn

from pipecompile.tracing import trace


class Body(nn.Module):
    def __init__(self, body) -> None:
        super().__init__()
        self.body = body

    def forward(self, x):
        return self.body(x)


@pytest.mark.parametrize(
    "body, op, target",
    [
        (lambda x: x @ x.T, "call_method", "matmul"),
        (lambda x: x[0], "call_function", operator.getitem),
        (lambda x: x**2, "call_function", operator.pow),
        (lambda x: 2**x, "call_method", "__rpow__"),
        (lambda x: x // 2, "call_function", operator.floordiv),
        (lambda x: (x > 0) & (x < 1), "call_function", operator.and_),
        (lambda x: x.T, "call_function", getattr),
        (lambda x: x.relu(), "call_method", "relu"),
        (lambda x: torch.relu(x), "call_function", torch.relu),
        (lambda x: nn.functional.gelu(x), "call_function", nn.functional.gelu),
    ],
)
def test_calls_are_written_as_fx_writes_them(body, op, target):
    x = torch.rand(3, 3)
    graph = trace(Body(body), x)
    assert (op, target) in {(node.op, node.target) for node in graph.graph.nodes}
    assert torch.equal(graph(x), body(x))
