"""Whether the second of two calls is recorded as the first: tables may be left out, writes in place may not be new."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import fx, nn

import pipecompile as pc
from pipecompile.tracing.node_facts import NodeFacts, set_facts
from pipecompile.tracing.state.call_comparison import constant_nodes, recorded_alike


class Twice(nn.Module):
    """Calls a layer twice on one input; `again` is the rest of the second call, and gets the table of the first."""

    def __init__(self, again: Any) -> None:
        super().__init__()
        self.layer, self.again = nn.Linear(4, 4), again

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        table = torch.arange(4.0)
        return self.layer(x) * table + self.again(self.layer(x), table)


def calls(again: Any) -> tuple[list[fx.Node], list[fx.Node]]:
    graph = pc.trace(Twice(again), torch.randn(3, 4))
    nodes = [node for node in graph.graph.nodes if node.op.startswith("call_")][:-1]  # without the sum of both
    middle = [place for place, node in enumerate(nodes) if node.op == "call_module"][1]
    return nodes[:middle], nodes[middle:]


def is_alike(again: Any, *, has_constants: bool = True) -> bool:
    first, second = calls(again)
    constants = constant_nodes(first, training=True)
    assert [node.name for node in constants] == ["arange"]
    return recorded_alike(first, second, constants if has_constants else set())


def test_tables_of_the_first_call_may_be_used_and_converted_again_by_the_second() -> None:
    assert is_alike(lambda h, table: h * table)
    assert not is_alike(lambda h, table: h * table, has_constants=False)
    assert is_alike(lambda h, table: h * table.to(h.dtype))  # it returns its own argument


def test_other_calls_and_writes_in_place_are_another_call() -> None:
    assert not is_alike(lambda h, table: h + table)
    assert not is_alike(lambda h, table: h.add_(1.0) * table)


def test_functions_that_each_call_makes_are_alike_and_tensors_are_not() -> None:
    def made(held: Any) -> Any:
        return lambda gradient: gradient * held

    def alike(one: Any, other: Any) -> bool:
        graph, nodes = fx.Graph(), []
        for value in (one, other):
            nodes.append(graph.get_attr(f"_constant_{len(nodes)}"))
            set_facts(nodes[-1], NodeFacts(), value)
        calls = [graph.call_function(len, (node,)) for node in nodes]
        for call in calls:
            set_facts(call, NodeFacts(), None)
        return recorded_alike(calls[:1], calls[1:], set())

    items: list[Any] = []
    assert alike(made(1), made(1))
    assert alike(items.append, items.append)
    assert alike(made(torch.ones(1)), made(torch.zeros(1))), "a node gives each its tensor"
    assert alike(partial(made(1), 2), partial(made(1), 2))
    assert not alike(made(1), made(2))
    assert not alike([].append, items.append)
    assert not alike(partial(made(1), torch.ones(1)), partial(made(1), torch.zeros(1)))
    assert not alike(torch.ones(1), torch.zeros(1))


class NotingItsKind(nn.Module):
    """Notes the kind of its task in the first call, and flattens to a size that numpy computes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.kind = nn.Linear(4, 4), ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.kind:
            self.kind = "regression"
        return self.layer(x.reshape(len(x), np.prod(x.shape[1:-1]), -1)) * np.float32(0.5)


def test_numbers_of_numpy_that_each_call_makes_are_alike() -> None:
    model, x = NotingItsKind(), torch.randn(3, 2, 2, 4)
    graph = pc.trace(model, x)
    assert torch.equal(graph(x), model(x))
    assert model.kind == "regression"


class ReadsTheCallBefore(nn.Module):
    """Adds another table in its first call than in later ones, which find what the call before has left."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.left: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        cos, sin = torch.arange(4.0).cos(), torch.arange(4.0).sin()
        table, self.left = sin if self.left is None else self.left, cos
        return self.layer(x) + table


def test_results_of_other_calls_are_not_alike() -> None:
    """Two results were taken for one value that each call makes: the recording added the table of the first call for ever."""
    model, x = ReadsTheCallBefore(), torch.randn(4, 4)
    reference = copy.deepcopy(model)
    pipe = pc.compile(model, 1, example_args=(x,), n_microbatches=1, cost="analytic")
    for _ in range(3):
        torch.testing.assert_close(pipe(x), reference(x))
