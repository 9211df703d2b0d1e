"""Calls that keep samples apart are recognised, and no other call is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import pipecompile as pc
from pipecompile.graph.batch_rows import batch_dim_of, kept_apart
from pipecompile.graph.colocation import compute_nodes
from pipecompile.tracing.node_facts import value_of


class Model(nn.Module):
    def __init__(self, ends: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.ends, self.norm, self.conv = ends, nn.LayerNorm(6), nn.Conv1d(2, 2, 1)

    def forward(self, x: torch.Tensor) -> Any:
        return self.ends(x)


def decided(ends: Callable[[torch.Tensor], Any]) -> bool:
    graph = pc.trace(Model(ends), torch.randn(4, 2, 6))
    call = next(node for node in compute_nodes(graph) if any(s.op == "placeholder" for s in node.all_input_nodes))
    return kept_apart(call, graph, [node for node in graph.graph.nodes if node.op == "placeholder"])


@pytest.mark.parametrize(
    "ends",
    [
        torch.sigmoid, F.gelu, lambda x: x + 1, lambda x: x.softmax(-1), lambda x: x.sum((1, 2)), lambda x: x.permute(1, 0, 2),
        lambda x: x.flatten(1), lambda x: x[:, 0], lambda x: torch.stack([x, x], 1), lambda x: x.split(3, 2), lambda x: torch.mul(x, 2),
        nn.LayerNorm(6), nn.Conv1d(2, 2, 1), lambda x: F.dropout(x), lambda x: x.sort(1),
        lambda x: torch.randint_like(x, 3), lambda x: F.pad(x, (0, 1, 2, 3)), lambda x: torch.linalg.svd(x[:, None])[0], lambda x: x[:, None].pinverse(),
        lambda x: torch.linalg.solve_triangular(torch.eye(2), x, upper=False),
    ],
)  # fmt: skip
def test_calls_that_keep_samples_apart(ends: Callable[[torch.Tensor], Any]) -> None:
    assert decided(ends)


@pytest.mark.parametrize(
    "ends",
    [
        lambda x: x.softmax(0), lambda x: x.sum(), lambda x: x.mean((0, 1)), lambda x: x.flip(0), lambda x: x.roll(1, 0),
        lambda x: torch.cat([x, x]), lambda x: x.cumsum(0), lambda x: x[1:], lambda x: x.sort(0), lambda x: x.max(),
        lambda x: F.batch_norm(x, None, None, training=True), lambda x: x.reshape(2, -1), lambda x: x.repeat(2, 1, 1),
        lambda x: F.pad(x, (0, 0, 0, 0, 1, 0)),
    ],
)  # fmt: skip
def test_other_calls_are_left_to_experiments(ends: Callable[[torch.Tensor], Any]) -> None:
    assert not decided(ends)


def test_the_batch_dimension_is_the_one_with_a_whole_number_of_rows() -> None:
    graph = pc.trace(Model(lambda x: (x.mT.flatten(0, 1), x.T, x[1:])), torch.randn(4, 2, 6))
    values = value_of(graph.graph.output_node())
    assert [batch_dim_of(value, graph.facts.symbol) for value in values] == [0, 2, None]


def test_of_a_second_argument_only_the_shape_may_be_read() -> None:
    model = Model(lambda x: x.mean((1, 2), keepdim=True).expand_as(x.relu()) + x.flatten(0, 1).reshape_as(x))
    graph = pc.trace(model, torch.randn(4, 2, 6))
    calls = [node for node in compute_nodes(graph) if str(node.target).endswith("_as")]
    assert [kept_apart(node, graph, node.all_input_nodes) for node in calls] == [True, True]
