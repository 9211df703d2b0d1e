"""The tail of a graph computes on the whole mini-batch what no rule merges."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

import pipecompile as pc
from pipecompile.graph.batch_flow import BatchFlow
from pipecompile.graph.whole_batch import WholeBatchTail, mixing_line, tail_refusal


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(3, 4), nn.Linear(4, 2), nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        h = self.a(x)
        ranks = h.cumsum(0)
        return {
            "rows": h,
            "scan": ranks / len(x),
            "head": self.b(ranks),
            "drop": F.dropout(ranks),
            "norm": self.norm(ranks),
        }


@pytest.fixture(scope="module")
def flow() -> BatchFlow:
    return BatchFlow(pc.trace(Model(), torch.randn(4, 3)))


def leaf(flow: BatchFlow, index: int) -> fx.Node:
    arguments: Any = flow.graph.graph.output_node().args[0]
    node: fx.Node = arguments[index]
    return node


def test_the_tail_begins_behind_the_values_that_merge(flow: BatchFlow) -> None:
    tail = WholeBatchTail.of(flow, [leaf(flow, 1)], [leaf(flow, 0)], torch.device("cpu"))
    assert list(tail.rules) == ["a"]
    assert "cumsum" in tail.rest  # other outputs need it
    h = torch.randn(6, 4)
    (scan,) = tail.run({"a": h}, 6).values()
    torch.testing.assert_close(scan, h.cumsum(0) / 6)


def test_a_tail_is_refused_with_the_reason(flow: BatchFlow) -> None:
    whys = [tail_refusal(flow, [leaf(flow, i)], is_shared_memory=True) for i in range(1, 5)]
    assert [bool(why) for why in whys] == [False, False, True, True]
    assert "random numbers" in whys[2]
    assert "its own state" in whys[3]
    assert "several devices" in tail_refusal(flow, [leaf(flow, 2)], is_shared_memory=False)


class Differentiates(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x)
        with torch.enable_grad():
            start = h.detach().requires_grad_()
            rows = self.b(start)
            (gradient,) = torch.autograd.grad((rows - rows.cumsum(0)).square().sum(), start)
        return h - gradient


def test_a_tail_that_differentiates_what_the_stages_compute_is_refused() -> None:
    """The call of autograd.grad failed with an error of torch: the joined values have no graph."""
    model, x = Differentiates(), torch.randn(4, 3)
    flow = BatchFlow(pc.trace(model, x))
    assert "autograd.grad" in tail_refusal(flow, [leaf(flow, 0)], is_shared_memory=True)
    pipe = pc.compile(model, 2, n_microbatches=2, cost="analytic")
    with torch.no_grad(), pytest.raises(pc.InputError, match=r"autograd\.grad differentiates there"):
        pipe(x)


def test_the_line_at_which_samples_meet_is_named(flow: BatchFlow) -> None:
    line = Model.forward.__code__.co_firstlineno + 2
    assert mixing_line(flow, leaf(flow, 2)) == f"test_whole_batch.py:{line} in Model.forward"


class Scan(nn.Module):
    """A scan over rows in another order. The number of its rows, which the stages return, needs the scan in the stages, too."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(3, 4)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        h = self.a(x)
        order = h[:, 0].argsort()
        back = torch.full_like(order, 1_000_000)
        back[order] = torch.arange(len(x))
        scan = h[order].cumsum(0)[back]
        return {"scan": scan, "ones": scan.new_ones(len(x), 2)}


def test_writes_in_place_stay_in_the_stages_that_read_the_memory() -> None:
    model, x = Scan(), torch.randn(4, 3)
    pipe = pc.compile(model, 1, example_args=(x,), n_microbatches=2, cost="analytic", devices=["cpu"])
    outputs, expected = pipe(x), model(x)
    torch.testing.assert_close(outputs["scan"], expected["scan"])
    assert torch.equal(outputs["ones"], expected["ones"])
