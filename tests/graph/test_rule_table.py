"""The table of merge rules, and the regions of calls between values with rules."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

import pipecompile as pc
from pipecompile.batching.merging import MergeKind, MergeRule
from pipecompile.graph.batch_flow import BatchFlow
from pipecompile.graph.rule_table import MERGED, RuleTable
from pipecompile.tracing.node_facts import facts


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(3, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x)
        counts = F.one_hot(y.argmax(1), 6).sum(0)
        return (y.exp().cumsum(0) + y + counts).flip(0)


@pytest.fixture
def flow() -> BatchFlow:
    return BatchFlow(pc.trace(Model(), torch.randn(4, 3)))


def end_of(flow: BatchFlow) -> fx.Node:
    (end,) = flow.graph.graph.output_node().args[0]  # type: ignore[misc]
    assert isinstance(end, fx.Node)
    return end


def names(nodes: list[fx.Node]) -> list[str]:
    return [node.name for node in nodes]


def test_a_region_begins_behind_values_with_rules(flow: BatchFlow) -> None:
    inputs, region = flow.region_of([end_of(flow)])
    assert names(inputs) == ["a", "sum_1", "exp"]
    assert names(region) == ["cumsum", "add", "add_1", "flip"]


def test_a_region_of_rows_begins_behind_rows_of_real_numbers(flow: BatchFlow) -> None:
    inputs, region = flow.table.region_of([end_of(flow)], begins=flow.table.may_begin_rows)
    assert names(inputs) == ["a", "exp"]
    assert {"argmax", "sum_1", "flip"} <= set(names(region))


def test_rules_are_noted_in_order(flow: BatchFlow) -> None:
    table = RuleTable(flow.graph)
    end = end_of(flow)
    table.note(end, [MergeRule(MergeKind.COMPUTED)])
    assert table.seen == [end]
    assert not table.is_merged(end)
    assert table.rule(end).kind not in MERGED


def test_a_region_costs_its_length(monkeypatch: pytest.MonkeyPatch) -> None:
    class Sorted(nn.Module):
        def __init__(self, depth: int) -> None:
            super().__init__()
            self.depth = depth

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(self.depth):
                x = x.exp()
            return x

    asked = []

    def counted(node: fx.Node) -> object:
        asked.append(node)
        return facts(node)

    monkeypatch.setattr("pipecompile.graph.rule_table.facts", counted)
    costs = []
    for depth in (20, 40):
        graph = pc.trace(Sorted(depth), torch.randn(4, 3))
        table = RuleTable(graph)
        for node in graph.graph.nodes:
            if node.op != "output":
                table.note(node, [MergeRule(MergeKind.COMPUTED)])
        asked.clear()
        end = graph.graph.output_node().args[0][0]  # type: ignore[index]
        assert isinstance(end, fx.Node)
        _, region = table.region_of([end])
        assert len(region) == depth
        costs.append(len(asked))
    assert costs[1] < 2.5 * costs[0], "the calls that share memory were looked for among all calls, for every call"


class Gradient(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = x.sin()
        leaf = x.detach().requires_grad_()
        return torch.autograd.grad((leaf * scale).cos().sum(), leaf)[0]


def test_the_region_of_a_gradient_begins_at_what_is_differentiated() -> None:
    flow = BatchFlow(pc.trace(Gradient(), torch.randn(4, 3)))
    (call,) = [node for node in flow.graph.graph.nodes if node.target is torch.autograd.grad]
    inputs, region = flow.table.region_of_gradient(call)
    assert names(region) == ["mul", "cos", "sum_1", "grad"]
    assert names(inputs) == ["sin", "requires_grad"]
