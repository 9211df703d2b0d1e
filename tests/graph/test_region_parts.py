"""Regions that a cut divides are recomputed in parts, as often as eager recomputes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import nn
from torch.utils.checkpoint import checkpoint

import pipecompile as pc
from pipecompile.graph.colocation import reasons_of_ties
from tests.support.checkpointed import Functional, Net, built, compiled
from tests.support.eager import accumulate, assert_same

REENTRANT = pytest.mark.parametrize("reentrant", [False, True])


def nested(outer: bool, inner: bool) -> Callable[[Any, torch.Tensor], torch.Tensor]:
    def body(m: Any, x: torch.Tensor) -> torch.Tensor:
        def first(h: torch.Tensor) -> torch.Tensor:
            return m.norms[0](m.a(h)).tanh()

        def second(h: torch.Tensor) -> torch.Tensor:
            return m.norms[1](m.b(h)).tanh()

        def both(h: torch.Tensor) -> torch.Tensor:
            return checkpoint(second, checkpoint(first, h, use_reentrant=inner).sin(), use_reentrant=inner)

        return checkpoint(both, m.a(x), use_reentrant=outer)

    return body


@pytest.mark.parametrize("n_stages", [4])
@pytest.mark.parametrize("inner", [False, True])
@pytest.mark.parametrize("outer", [False, True])
def test_regions_in_regions_are_recomputed_as_often_as_in_eager(outer, inner, n_stages):
    model, eager = built(lambda: Functional(nested(outer, inner)))
    x = torch.randn(6, 4)
    compiled(model, x, n_stages).step(x)
    accumulate(eager, x, 1)
    assert_same(model, eager)


@REENTRANT
def test_a_part_that_writes_into_a_received_value_copies_it_each_time_it_runs(reentrant):
    model, eager = built(lambda: Net(reentrant))
    x = torch.randn(8, 4)
    pipe = compiled(model, x, 12, n_microbatches=2)
    assert any("relu" in stage.first for stage in pipe.plan.stages)
    pipe.step(x)
    accumulate(eager, x, 2)
    assert_same(model, eager)


class CountingNorm(nn.BatchNorm1d):
    """Counts its batches by a node of its own, as the norms of timm do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_batches_tracked.add_(1)
        return nn.functional.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, True)


class Counted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.norm, self.last = (nn.Linear(4, 4), nn.Linear(4, 4), CountingNorm(4), nn.Linear(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.b(self.a(x).relu())
        return self.last(checkpoint(lambda h: self.norm(h).relu(), x, use_reentrant=False))


def test_a_write_that_needs_no_other_node_runs_again_with_its_region() -> None:
    model, eager = built(Counted)
    x = torch.randn(6, 4)
    assert reasons_of_ties(pc.trace(model, x)).has_edge("norm_add", "norm_batch_norm")
    compiled(model, x, n_stages=2).step(x)
    accumulate(eager, x, 1)
    assert model.norm.num_batches_tracked == eager.norm.num_batches_tracked == 2


class CountedAtItsEnd(Counted):
    """Writes twice at the end of the region, which reentrant autograd runs again as a whole."""

    def part(self, h: torch.Tensor) -> torch.Tensor:
        h = h.relu()
        self.norm.running_mean.add_(1)
        self.norm.num_batches_tracked.add_(1)
        return h

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(checkpoint(self.part, self.b(self.a(x).relu()), use_reentrant=True))


def test_writes_at_the_end_of_a_region_run_again_with_the_node_before_them() -> None:
    ties = reasons_of_ties(pc.trace(CountedAtItsEnd(), torch.randn(6, 4)))
    assert ties.has_edge("add", "relu_1")
    assert ties.has_edge("add_1", "relu_1")
