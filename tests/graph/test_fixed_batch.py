"""Recordings for one batch size: rules by comparison with a recording of twice as many samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import pipecompile as pc
from pipecompile.batching.merging import MergeKind
from pipecompile.graph.fixed_batch import UNPROVEN, fixed_rules


class Model(nn.Module):
    def __init__(self, ends: Callable[[list[torch.Tensor]], Any]) -> None:
        super().__init__()
        self.a, self.ends = nn.Linear(3, 4), ends

    def forward(self, x: torch.Tensor) -> Any:
        return self.ends([*self.a(x)])


@pytest.mark.parametrize(
    ("kind", "ends"),
    [
        (MergeKind.JOINED, torch.stack),
        (MergeKind.LISTED, lambda rows: rows),
        (MergeKind.ADDED, lambda rows: sum(row.sum() for row in rows)),
        (MergeKind.MAXIMUM, lambda rows: torch.stack([row.max() for row in rows]).max()),
        (MergeKind.REFUSED, lambda rows: rows[::-1]),
        (MergeKind.REFUSED, lambda rows: torch.stack(rows[::-1])),
        (MergeKind.REFUSED, lambda rows: torch.stack(rows).norm()),
        (MergeKind.REFUSED, lambda rows: {"rows": rows}),
    ],
)
def test_rules_come_from_experiments_on_both_recordings(
    kind: MergeKind, ends: Callable[[list[torch.Tensor]], Any]
) -> None:
    model = Model(ends)
    graphs = [pc.trace(model, torch.randn(size, 3)) for size in (2, 4)]
    assert {rule.kind for rule in fixed_rules(*graphs)} == {kind}


def test_without_another_recording_the_batch_is_found_by_its_length() -> None:
    graph = pc.trace(Model(torch.stack), torch.randn(2, 3))
    assert [rule.kind for rule in fixed_rules(graph, None)] == [MergeKind.JOINED]
    draws = Model(lambda rows: torch.stack(rows) * torch.rand(1))
    (rule,) = fixed_rules(*(pc.trace(draws, torch.randn(size, 3)) for size in (2, 4)))
    assert (rule.kind, rule.reason) == (MergeKind.JOINED, UNPROVEN)
