"""The divisor of a loss is found in its graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import pipecompile as pc
from pipecompile.batching.microbatches import LossDivisor
from pipecompile.graph.batch_flow import BatchFlow
from pipecompile.graph.loss_divisors import divisor_of

LABELS = torch.tensor([0, 2, -100, 1])


class Model(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.scale = kind, nn.Parameter(torch.ones(3))

    def forward(self, y: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        match self.kind:
            case "ignored":
                return F.cross_entropy(y, labels) * 2
            case "weighted":
                return F.nll_loss(y.log_softmax(1), labels, torch.tensor([1.0, 2.0, 3.0]))
            case "mask":
                mask = labels != -100
                return (y.sum(1) * mask).sum() / mask.sum()
            case "by parameters":
                return y.sum() / (self.scale.sum() * labels.sum())
            case _:
                return y.mean()


def found(kind: str) -> LossDivisor | None:
    graph = pc.trace(Model(kind), torch.randn(4, 3), LABELS)
    loss: Any = graph.graph.output_node().args[0]
    return divisor_of(BatchFlow(graph), loss[0])


@pytest.mark.parametrize(("kind", "divisor"), [("ignored", 3.0), ("weighted", 6.0), ("mask", 3.0)])
def test_what_counts(kind: str, divisor: float) -> None:
    one = found(kind)
    assert one is not None
    assert one.inputs == ("labels",)
    assert one.of({"labels": LABELS}, 4) == divisor
    assert not one.is_complete({"labels": LABELS})
    assert one.renamed(["t"]).of({"t": LABELS}, 4) == divisor


def test_a_plain_mean_and_one_by_parameters_have_no_divisor() -> None:
    assert found("plain") is None
    assert found("by parameters") is None
