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
from pipecompile.graph.loss_divisors import divisor_of, meeting_before

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
            case "met":
                return F.cross_entropy(y - y.mean(0), labels)
            case "met before a mask":
                return ((y / y.std()).sum(1) * (labels != -100)).sum() / (labels != -100).sum()
            case "pairs":
                return F.cross_entropy(y @ y.T, labels)
            case "pairs over a number":
                return (y @ y.T).sum() / labels.sum()
            case "by parameters":
                return y.sum() / (self.scale.sum() * labels.sum())
            case _:
                return y.mean()


def analysed(kind: str) -> tuple[BatchFlow, Any]:
    graph = pc.trace(Model(kind), torch.randn(4, 3), LABELS)
    loss: Any = graph.graph.output_node().args[0]
    return BatchFlow(graph), loss[0]


def found(kind: str) -> LossDivisor | None:
    return divisor_of(*analysed(kind))


@pytest.mark.parametrize(
    ("kind", "divisor"), [("ignored", 3.0), ("weighted", 6.0), ("mask", 3.0), ("met", 3.0), ("met before a mask", 3.0)]
)
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


@pytest.mark.parametrize("kind", ["pairs", "pairs over a number"])
def test_a_loss_of_pairs_of_samples_has_no_divisor(kind: str) -> None:
    assert found(kind) is None


@pytest.mark.parametrize("kind", ["met", "met before a mask"])
def test_the_line_where_samples_meet_before_the_mean(kind: str) -> None:
    assert "test_loss_divisors.py" in meeting_before(*analysed(kind))


def test_a_mean_of_samples_that_stay_apart_has_no_such_line() -> None:
    assert not meeting_before(*analysed("ignored"))


def test_terms_of_a_sum_share_their_divisor_and_constants_need_one_that_adds_up() -> None:
    flow, loss = analysed("ignored")
    assert divisor_of(flow, loss, loss, has_constant=True) == divisor_of(flow, loss)
    flow, loss = analysed("mask")
    assert divisor_of(flow, loss, has_constant=True) is not None
