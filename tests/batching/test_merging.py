"""Values of micro-batches are merged by their rules, and gradients go back by the derivative."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipecompile.batching.merging import MergeKind, MergeRule, gather, ungather
from pipecompile.batching.microbatches import scatter


@given(st.integers(1, 20), st.integers(1, 5))
def test_gather_undoes_scatter(samples: int, count: int) -> None:
    x = torch.arange(samples * 3.0).reshape(samples, 3)
    parts = scatter(x, 0, min(count, samples))
    assert torch.equal(gather(parts, MergeRule(MergeKind.JOINED, 0), [len(part) for part in parts]), x)


def test_an_output_without_batch_dimension_is_averaged_added_or_the_same() -> None:
    numbers = [torch.tensor(1.0), torch.tensor(4.0)]
    assert gather(numbers, MergeRule(MergeKind.AVERAGED), [3, 1]) == 1.75
    assert gather(numbers, MergeRule(MergeKind.ADDED), [3, 1]) == 5
    assert gather(numbers, MergeRule(MergeKind.SAME), [3, 1]) == 4
    counts = gather(
        [torch.tensor(3, dtype=torch.int8), torch.tensor(4, dtype=torch.int8)], MergeRule(MergeKind.ADDED), [3, 1]
    )
    assert (counts.item(), counts.dtype) == (7, torch.int8)


@pytest.mark.parametrize(
    "join",
    [
        MergeRule(MergeKind.AVERAGED),
        MergeRule(MergeKind.ADDED),
        MergeRule(MergeKind.SAME),
        MergeRule(MergeKind.JOINED, 1),
        *map(
            MergeRule,
            (MergeKind.MAXIMUM, MergeKind.MINIMUM, MergeKind.MULTIPLIED, MergeKind.LOGSUMEXP, MergeKind.FIRST),
        ),
    ],
)
def test_ungather_is_the_derivative_of_gather(join: MergeRule) -> None:
    parts = [torch.randn(2, size, requires_grad=True) for size in ((3, 1) if join.dim else (2, 2))]
    whole = gather(parts, join, [3, 1])
    gradient = torch.randn_like(whole)
    expected = torch.autograd.grad(whole, parts, gradient, allow_unused=True)
    for mine, theirs in zip(ungather(gradient, parts, join, [3, 1]), expected, strict=True):
        assert mine is theirs is None or torch.allclose(mine, theirs)


def test_truth_values_are_merged_by_any_and_all() -> None:
    parts = [torch.tensor([True, False, True]), torch.tensor([True, False, False])]
    assert gather(parts, MergeRule(MergeKind.MAXIMUM), [3, 1]).tolist() == [True, False, True]
    assert gather(parts, MergeRule(MergeKind.MINIMUM), [3, 1]).tolist() == [True, False, False]
