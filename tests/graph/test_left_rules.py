"""Merge rules of what a forward leaves on the model."""

from __future__ import annotations

import torch
from torch import nn

import pipecompile as pc
from pipecompile.batching.merging import MergeKind
from pipecompile.graph.batch_flow import BatchFlow
from pipecompile.graph.left_rules import left_rules


class Leaves(nn.Linear):
    calls = 0
    rows = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        self.calls += 1
        self.rows += len(x)
        self.last = [y.detach(), y.detach().mean(0), 5]
        self.spread = y.detach().std()
        return y


def test_rules_follow_the_batch() -> None:
    rules = {one.place.key: one for one in left_rules(BatchFlow(pc.trace(Leaves(3, 2), torch.randn(4, 3))))}
    assert rules["calls"].leaves == ()
    assert "rows" not in rules  # micro-batches add up to the mini-batch
    assert [one.kind for one in rules["last"].leaves] == [MergeKind.JOINED, MergeKind.AVERAGED, MergeKind.SAME]
    assert rules["last"].line == ""
    assert "test_left_rules.py" in rules["spread"].line
