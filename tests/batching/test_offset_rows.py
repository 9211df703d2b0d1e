"""Offsets of packed sequences are recognised, read, and divided into groups of whole sequences."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pipecompile.batching.offset_rows import document_groups, is_offsets_beside, offsets_of
from pipecompile.errors import InputError


def test_offsets_end_at_the_length_of_another_tensor() -> None:
    row, tokens = torch.tensor([0, 2, 9]), torch.zeros(1, 9)
    assert is_offsets_beside(row, [row, tokens, None])
    assert not is_offsets_beside(row, [row, torch.zeros(8)])
    assert not is_offsets_beside(row, [row])


def test_offsets_by_ends_and_by_lengths() -> None:
    assert offsets_of("cu", torch.tensor([0, 4, 6]), "offsets") == [0, 4, 6]
    assert offsets_of("n", torch.tensor([4, 0, 2]), "lengths") == [0, 4, 4, 6]


@pytest.mark.parametrize(
    ("value", "rule"),
    [([0, 4], "offsets"), (torch.tensor([0.0, 4.0]), "offsets"), (torch.tensor([[0, 4]]), "offsets"),
     (torch.tensor([1, 4]), "offsets"), (torch.tensor([0, 4, 2]), "offsets"), (torch.tensor([0]), "offsets"),
     (torch.tensor([2, -1]), "lengths"), (torch.tensor([0, 0]), "lengths"), (torch.tensor([], dtype=torch.long), "lengths")],
)  # fmt: skip
def test_what_are_no_offsets(value: Any, rule: str) -> None:
    with pytest.raises(InputError, match="cu"):
        offsets_of("cu", value, rule)


@pytest.mark.parametrize(
    ("lengths", "count", "expected"),
    [
        ([4, 2, 3], 2, [(0, 1), (1, 3)]),
        ([1, 1, 1, 9], 2, [(0, 3), (3, 4)]),
        ([9, 1, 1, 1], 3, [(0, 1), (1, 2), (2, 4)]),
        ([5, 5], 4, [(0, 1), (1, 2)]),
        ([0, 3, 0, 3, 0], 2, [(0, 2), (2, 5)]),
        ([7], 3, [(0, 1)]),
    ],
)
def test_groups_have_whole_sequences_and_tokens_each(lengths: list[int], count: int, expected: list[Any]) -> None:
    offsets = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    groups = document_groups(offsets, count)
    assert [first for first, _ in groups] == [0, *(end for _, end in groups[:-1])]
    assert groups[-1][1] == len(lengths)
    assert all(offsets[end] > offsets[first] for first, end in groups)
    assert len(groups) == len(expected)
    assert groups == expected
