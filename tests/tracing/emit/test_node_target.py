from __future__ import annotations

import operator

import pytest
import torch
from torch import nn

import pipecompile as pc
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


class Named(nn.Module):
    """Names that a GraphModule has for itself, and such that Python's syntax has."""

    NAMES = ("graph", "code", "meta", "recompile", "delegate")

    def __init__(self) -> None:
        super().__init__()
        for name in self.NAMES:
            setattr(self, name, nn.Linear(4, 4))
        self.register_buffer("device_mesh", torch.ones(4))
        self.heads = nn.ModuleDict({name: nn.Linear(4, 4) for name in ("global", "lambda", "a-b", "1", "graph")})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for name in self.NAMES:
            x = getattr(self, name)(x) * self.device_mesh
        return sum(head(x) for head in self.heads.values()) + self.graph.weight.sum()


def test_modules_may_have_any_name() -> None:
    model = Named()
    graph = pc.trace(model, torch.randn(3, 4))
    x = torch.randn(5, 4)
    assert torch.equal(graph(x), model(x))
    pipe = pc.compile(model, 3, n_microbatches=2, loss_fn=lambda out: out.square().mean(), cost="analytic")
    pipe.step(x)
    assert list(pipe.state_dict()) == list(model.state_dict())
    assert pipe.plan.stages[0].first == "graph"
    assert all(p.grad is not None for p in model.parameters())
