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
        (MergeKind.JOINED, lambda rows: torch.stack(rows)[torch.stack(rows)[:, 0] > 0]),
        (MergeKind.REFUSED, lambda rows: (torch.stack(rows)[:, 0] > 0).nonzero()),
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


def test_of_an_output_with_a_list_of_rows_only_leaves_of_the_list_have_a_reason() -> None:
    model = Model(lambda rows: {"all": torch.stack(rows), "in": {"rows": rows, "three": rows[0]}})
    rules = fixed_rules(*(pc.trace(model, torch.randn(size, 3)) for size in (2, 4)))
    assert [bool(rule.reason) for rule in rules] == [False, True, True, False]


def test_without_another_recording_the_batch_is_found_by_its_length() -> None:
    graph = pc.trace(Model(torch.stack), torch.randn(2, 3))
    assert [rule.kind for rule in fixed_rules(graph, None)] == [MergeKind.JOINED]
    draws = Model(lambda rows: torch.stack(rows) * torch.rand(1))
    (rule,) = fixed_rules(*(pc.trace(draws, torch.randn(size, 3)) for size in (2, 4)))
    assert (rule.kind, rule.reason) == (MergeKind.JOINED, UNPROVEN)


class Weighted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([*x]) @ self.weight


def test_both_recordings_have_the_same_parameters_in_an_experiment() -> None:
    """A weight that is not a layer's was drawn for each recording, and rows were refused because samples meet."""
    pipe = pc.compile(Weighted(), 1, n_microbatches=2, cost="analytic", devices=["cpu"])
    x = torch.randn(4, 3)
    torch.testing.assert_close(pipe(x), pipe.model(x))


def test_lengths_that_the_data_decide_are_not_that_of_the_batch() -> None:
    graph = pc.trace(Model(lambda rows: rows[0][rows[0] > 0]), torch.randn(2, 3))
    assert [rule.kind for rule in fixed_rules(graph, None)] == [MergeKind.REFUSED]


@pytest.mark.parametrize("ignored", [-100, -1, 255, 3])
def test_the_class_that_a_loss_ignores_is_drawn_among_labels_though_it_is_no_token(ignored: int) -> None:
    class Losing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(9, 4)

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            y = torch.stack([self.table(row) for row in x])
            return nn.functional.cross_entropy(y.mT, labels, ignore_index=ignored)

    graphs = [pc.trace(Losing(), torch.ones(size, 3).long(), torch.ones(size, 3).long()) for size in (2, 4)]
    assert [rule.kind for rule in fixed_rules(*graphs)] == [MergeKind.REFUSED]


def test_a_batch_size_that_is_checked_last_is_found_in_the_sizes_before() -> None:
    class Checks(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = super().forward(x)
            if y.shape[0] != 4:
                raise ValueError("four samples, please")
            return y

    graph = pc.trace(Checks(3, 4), torch.randn(4, 3))  # as many features as samples
    assert [(rule.kind, rule.dim) for rule in fixed_rules(graph, None)] == [(MergeKind.JOINED, 0)]
