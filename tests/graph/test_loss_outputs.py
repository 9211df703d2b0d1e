"""Outputs as a loss function gets them: shapes for any number of samples, and what inputs alone decide."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import pipecompile as pc
from pipecompile.batching.merging import MergeKind, MergeRule
from pipecompile.graph.batch_flow import BatchFlow
from pipecompile.graph.loss_outputs import LossOutputs
from pipecompile.graph.output_merging import join_rules


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 6)

    def forward(self, x: torch.Tensor) -> Any:
        y = self.a(x)
        return {"tokens": y.view(-1, 2), "mask": x[:, 0] > 0, "norm": y.norm(), "count": len(x)}


def outputs() -> LossOutputs:
    graph = pc.trace(Model(), torch.randn(4, 4))
    flow = BatchFlow(graph)
    return LossOutputs.of(graph, join_rules(flow))


def test_shapes_follow_the_number_of_samples() -> None:
    found = outputs()
    tokens, mask, norm = found.places
    assert (found.rows(tokens), found.rows(mask)) == (3, 1)
    assert (found.shape(tokens, 7), found.shape(norm, 7)) == ([21, 2], [])
    assert [found.is_usable(place) for place in found.places] == [True, True, False]
    assert [found.is_recordable(place) for place in found.places] == [True, True, True]
    assert not found.is_merged


def test_a_value_that_inputs_decide_is_computed_from_them() -> None:
    found = outputs()
    x = torch.tensor([[1.0, 0, 0, 0], [-1.0, 0, 0, 0]])
    ((place, known),) = found.known.items()
    assert place == found.places[1]
    assert known.value({"x": x}, 2).tolist() == [True, False]


def test_an_output_has_the_structure_of_the_model_s() -> None:
    output = outputs().output([torch.zeros(6, 2), torch.ones(2), torch.tensor(0.5)], 2)
    assert list(output) == ["tokens", "mask", "norm", "count"]
    assert output["count"] == 2


def test_a_recording_for_one_size_is_scaled_along_its_batch() -> None:
    found = outputs()
    rules = [MergeRule(MergeKind.JOINED, 0)]
    fixed = LossOutputs(found.spec, [torch.zeros(8, 5)], rules, found.symbol, 4)
    assert fixed.shape(0, 3) == [6, 5]
    assert fixed.is_merged
