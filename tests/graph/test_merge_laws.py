"""Rules are proposed by shape and dtype, and hold or not on numbers."""

from __future__ import annotations

import torch
from torch import nn

import pipecompile as pc
from pipecompile.batching.merging import MergeKind, MergeRule
from pipecompile.graph.merge_laws import candidates_for, has_unknown_size, is_close, reductions_for, rule_holds
from pipecompile.tracing.node_facts import value_of


class Model(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x * 2, x.sum(), x @ x.T


def test_candidates_are_those_of_the_shape() -> None:
    graph = pc.trace(Model(), torch.randn(4, 3))
    rows, number, pairs = value_of(graph.graph.output_node())
    symbol = graph.facts.symbol
    assert candidates_for(rows, symbol) == [MergeRule(MergeKind.JOINED, 0)]
    assert MergeRule(MergeKind.ADDED) in candidates_for(number, symbol)
    assert candidates_for(pairs, symbol) == candidates_for(3, symbol) == []
    assert not has_unknown_size(rows, symbol)


def test_truth_values_are_neither_added_nor_averaged() -> None:
    kinds = {rule.kind for rule in reductions_for(torch.tensor(True))}
    assert MergeKind.MAXIMUM in kinds
    assert kinds.isdisjoint({MergeKind.ADDED, MergeKind.AVERAGED})


def test_a_rule_holds_if_the_parts_give_the_whole() -> None:
    whole, parts = torch.tensor(2.0), [torch.tensor(1.0), torch.tensor(5.0)]
    assert rule_holds(MergeRule(MergeKind.AVERAGED), whole, parts, (3, 1))
    assert not rule_holds(MergeRule(MergeKind.ADDED), whole, parts, (3, 1))
    assert not rule_holds(MergeRule(MergeKind.SAME), whole, [None, None], (3, 1))


def test_results_are_close_up_to_rounding() -> None:
    assert is_close(torch.tensor([1.0, torch.nan]), torch.tensor([1.0 + 1e-6, torch.nan]))
    assert not is_close(torch.tensor([1]), torch.tensor([2]))
    assert not is_close(torch.ones(2), torch.ones(3))
