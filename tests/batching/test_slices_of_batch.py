"""Micro-batches divided along their sequence, which is dimension 1."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pipecompile.batching.call_inputs import flatten
from pipecompile.batching.microbatches import MiniBatch
from pipecompile.batching.slices_of_batch import SlicedBatch, sequence_length, sliced_target
from pipecompile.errors import InputError


def forward(*_: Any, **__: Any) -> None: ...


def batch_of(*leaves: Any, count: int = 2) -> MiniBatch:
    return MiniBatch(flatten(forward, leaves, {}), (2,) * count)


def test_slices_are_numbered_micro_batch_by_micro_batch() -> None:
    x, weight = torch.arange(32).view(4, 8), torch.rand(4)
    batch = SlicedBatch(batch_of(x, weight), 4)
    assert (batch.length, batch.sizes) == (2, (2,) * 8)
    parts, weights = batch.values
    assert torch.equal(torch.stack([torch.cat(parts[:4], 1), torch.cat(parts[4:], 1)]).view(4, 8), x)
    assert all(torch.equal(one, weight[2:]) for one in weights[4:])
    assert torch.equal(batch.first.leaves[0], x[:2, :2])


def test_targets_are_sliced_alike() -> None:
    batch, target = SlicedBatch(batch_of(torch.zeros(4, 8)), 2), torch.arange(32).view(4, 8)
    parts = sliced_target({"labels": target}, batch)
    assert torch.equal(parts[1]["labels"], target[:2, 4:])
    assert sliced_target(None, batch) == [None] * 4
    with pytest.raises(InputError, match="the target has no dimension of 8 positions"):
        sliced_target(torch.zeros(4), batch)


@pytest.mark.parametrize(
    ("leaf", "words"),
    [
        (torch.zeros(4), "no input has a sequence to slice"),
        (torch.zeros(4, 8, requires_grad=True), "an input requires a gradient"),
    ],
)
def test_what_cannot_be_sliced_is_refused(leaf: torch.Tensor, words: str) -> None:
    with pytest.raises(InputError, match=words):
        sequence_length(batch_of(leaf).whole)


def test_slices_have_equal_lengths() -> None:
    with pytest.raises(InputError, match="8 positions cannot be divided into 3 equal slices") as caught:
        SlicedBatch(batch_of(torch.zeros(4, 8)), 3)
    assert "sequences of 9 positions" in caught.value.hint
