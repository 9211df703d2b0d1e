"""The order of rows in values with several rows per sample."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import sympy
import torch

from pipecompile.graph.row_order import by_sample, rows_each, word_of
from pipecompile.tracing import trace
from pipecompile.tracing.fakes.batch_symbol import batch_dims_of
from tests.support.bodies import Body

N = sympy.Symbol("n", integer=True, positive=True)


def is_by_sample(body: Callable[[torch.Tensor], torch.Tensor]) -> bool:
    graph = trace(Body(lambda _, x: body(x)), torch.randn(3, 4, 5))
    node = graph.graph.output_node().args[0][0]
    return by_sample(node, graph.facts.symbol)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (lambda x: x.relu(), True),
        (lambda x: x.flatten(0, 1), True),
        (lambda x: x.transpose(0, 1).flatten(0, 1), False),
        (lambda x: torch.cat([x, x]), False),
        (lambda x: x.repeat_interleave(2, dim=0), True),
        (lambda x: x.repeat(2, 1, 1), False),
        (lambda x: x.flatten(0, 1).relu() + 1, True),
        (lambda x: x.flatten(0, 1).flip(0), False),
        (lambda x: x.flatten(0, 1).unflatten(0, (-1, 4)), True),
    ],
)  # fmt: skip
def test_rows_of_a_sample_are_adjacent(body: Callable[[torch.Tensor], torch.Tensor], expected: bool) -> None:
    assert is_by_sample(body) is expected


@pytest.mark.parametrize(("size", "rows"), [(N, 1), (3 * N, 3), (N + 1, None), (N**2, None), (sympy.Integer(4), None)])
def test_rows_per_sample(size: sympy.Basic, rows: int | None) -> None:
    assert rows_each(size, N) == rows


def test_batch_dims_and_words() -> None:
    graph = trace(Body(lambda _, x: x @ x.mT.new_ones(5, 2)), torch.randn(3, 4, 5))
    node = graph.graph.output_node().args[0][0]
    assert word_of(node) == "matmul"
    assert [dim for dim, _ in batch_dims_of(node.meta["val"], graph.facts.symbol)] == [0]


def test_a_value_on_many_ways_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def residual(x: torch.Tensor) -> torch.Tensor:
        h = x.flatten(0, 1)
        for _ in range(14):
            h = h + h.relu()
        return h.unflatten(0, (-1, 4))

    graph = trace(Body(lambda _, x: residual(x)), torch.randn(3, 4, 5))
    looked_at: list[object] = []

    def counted(value: torch.Tensor, symbol: sympy.Symbol) -> list[tuple[int, sympy.Basic]]:
        looked_at.append(value)
        return batch_dims_of(value, symbol)

    monkeypatch.setattr("pipecompile.graph.row_order.batch_dims_of", counted)
    end = graph.graph.output_node().args[0][0].args[0]
    assert by_sample(end, graph.facts.symbol)
    assert len(looked_at) < 10 * len(graph.graph.nodes), "each value on two ways doubled the work"
