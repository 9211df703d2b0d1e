"""Opcode, target and effects of calls as nodes of a graph."""

from __future__ import annotations

import operator

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import pipecompile as pc
from pipecompile.tracing import trace
from pipecompile.tracing.emit.call_description import is_metadata_query, undeclared_writes


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


@pytest.mark.parametrize(
    "size", [lambda x: x.size(), lambda x: x.shape[:1] + torch.Size([4]), lambda x: torch.Size([4])]
)
def test_a_new_tensor_of_a_size_has_this_size(size) -> None:
    """`x.new(x.size())` made a tensor of the numbers of the size, silently where both shapes could be added."""
    graph = trace(Body(lambda x: x + x.new(size(x)).fill_(2.0)), torch.rand(3, 4))
    for samples in (3, 5):
        assert torch.equal(graph(torch.zeros(samples, 4)), torch.full((samples, 4), 2.0))
    data = trace(Body(lambda x: x + x.new((1.0, 2.0))), torch.rand(3, 2))
    assert torch.equal(data(torch.zeros(1, 2)), torch.tensor([[1.0, 2.0]]))


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


X, MEAN, VAR = torch.randn(3, 4), torch.zeros(4), torch.ones(4)


def test_metadata_is_read_without_a_node() -> None:
    assert is_metadata_query(torch.Tensor.size)
    assert is_metadata_query(torch.Tensor.shape.__get__)
    assert not is_metadata_query(torch.Tensor.sum)
    assert not is_metadata_query(torch.Tensor.data.__get__)


def test_batch_norm_writes_its_statistics_only_while_training() -> None:
    assert list(map(id, undeclared_writes(F.batch_norm, (X, MEAN, VAR, None, None, True), {}))) == [id(MEAN), id(VAR)]
    assert undeclared_writes(F.batch_norm, (X, MEAN, VAR), {}) == []
    named = {"running_mean": MEAN, "running_var": VAR, "training": True}
    assert list(map(id, undeclared_writes(F.batch_norm, (X,), named))) == [id(MEAN), id(VAR)]


def test_instance_norm_uses_its_input_by_default() -> None:
    assert list(map(id, undeclared_writes(F.instance_norm, (X, MEAN, VAR), {}))) == [id(MEAN), id(VAR)]
    assert undeclared_writes(F.instance_norm, (X, None, None), {}) == []


def test_a_hook_changes_the_tensor_that_it_is_on() -> None:
    assert undeclared_writes(torch.Tensor.register_hook, (X, print), {})[0] is X
    assert undeclared_writes(torch.Tensor.requires_grad.__set__, (X, True), {})[0] is X
    assert undeclared_writes(torch.add, (X, X), {}) == []


def test_an_operator_writes_what_its_schema_says_by_place_or_by_name() -> None:
    operator = torch.ops.aten._fused_moving_avg_obs_fq_helper.default
    assert list(map(id, undeclared_writes(operator, (X, X, X, MEAN), {"scale": VAR}))) == [id(MEAN), id(VAR)]
