"""Sizes that the data decide are symbols, read from the tensors that have them."""

from __future__ import annotations

import sympy
import torch
from torch import fx

from pipecompile.tracing.fakes.batch_symbol import BatchSymbol


def test_none_and_one_are_recorded_like_many() -> None:
    sizes = BatchSymbol(4).data_sizes
    hints = [sizes.hints[sizes.new(example)[1]] for example in (7, 0, 1, 5)]
    assert hints == [7, 11, 12, 5]


def test_a_size_is_read_from_the_first_tensor_that_has_it() -> None:
    sizes = BatchSymbol(4).data_sizes
    (_, a), (_, b) = sizes.new(7), sizes.new(5)
    first, second, graph = torch.zeros(3, 7), torch.zeros(7), fx.Graph()
    sizes.bind(first, (3, a))
    sizes.bind(second, (a,))
    nodes = {id(first): graph.placeholder("first"), id(second): graph.placeholder("second")}
    read = sizes.read(graph, a, lambda tensor: nodes[id(tensor)])
    assert (read.target, read.args) == ("size", (nodes[id(first)], 1))
    assert sizes.symbols_in(a * 2 + 1) == [a]
    assert sizes.symbols_in(a + b) == [a, b]


def test_comparisons_become_conditions_of_the_call_whose_size_it_is() -> None:
    batch = BatchSymbol(4)
    sizes = batch.data_sizes
    (rows, a), (others, b) = sizes.new(7), sizes.new(5)
    assert rows > 2
    assert rows > batch.size
    assert sizes.conditions({b}, batch.symbol) == ()
    conditions = sizes.conditions({a}, batch.symbol)
    assert [condition.subs({a: 2, batch.symbol: 4}) for condition in conditions] == [sympy.false] * 2
    assert [condition.subs({a: 9, batch.symbol: 4}) for condition in conditions] == [sympy.true] * 2
    assert rows > others
    assert sympy.Eq(a, 7) in sizes.conditions({a}, batch.symbol)
    assert sympy.Eq(b, 5) in sizes.conditions({b}, batch.symbol)
