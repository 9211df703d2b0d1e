from __future__ import annotations

from collections import UserDict
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from pipecompile.batching.microbatch_list import Microbatch
from pipecompile.distributed.agreement.call_batch import CallBatch

X, Y = torch.arange(8.0), torch.arange(8)


@dataclass
class Pair:
    first: torch.Tensor
    second: torch.Tensor


def test_places_count_the_inputs_and_then_the_target() -> None:
    batch = CallBatch.of((X,), {"scale": 2}, {"labels": Y})
    assert (batch.places, batch.n_inputs, batch.bits) == ((0, 1, 2), 2, 0b111)
    assert [batch.name(index) for index in range(3)] == ["input 0", "input 1", "target"]


@pytest.mark.parametrize("value", [Pair(X, Y), UserDict(x=X, y=Y), [X, {"y": Y}]])
def test_objects_that_hold_tensors_are_taken_apart(value: Any) -> None:
    leaves = CallBatch.of((value,), {}, value).leaves
    assert [leaf is wanted for leaf, wanted in zip(leaves, (X, Y, X, Y), strict=True)] == [True] * 4


@pytest.mark.parametrize(
    "entries",
    [
        [(X, Y), (X + 1, Y + 1)],
        [Microbatch(X, target=Y), Microbatch(X + 1, target=Y + 1)],
        [{"x": X, "target": Y}, {"target": Y + 1, "x": X + 1}],
        [UserDict(target=Y, x=X), UserDict(x=X + 1, target=Y + 1)],
    ],
)
def test_the_entries_of_a_list_have_the_places_of_a_batch(entries: list[Any]) -> None:
    batch = CallBatch.of_list(entries, with_target=True)
    assert (batch.places, batch.n_inputs) == ((0, 1, 0, 1), 1)
    assert [leaf.tolist()[0] for leaf in batch.leaves] == [0, 0, 1, 1]


def test_keywords_have_the_order_of_the_first_entry() -> None:
    batch = CallBatch.of_list([{"x": X, "mask": Y}, {"mask": Y, "x": X}], with_target=False)
    assert [leaf is wanted for leaf, wanted in zip(batch.leaves, (X, Y, X, Y), strict=True)] == [True] * 4


def test_unlike_entries_have_a_place_per_leaf() -> None:
    batch = CallBatch.of_list([[X], [X, Y]], with_target=False)
    assert (batch.places, batch.n_inputs) == ((0, 1, 2), 3)


@pytest.mark.parametrize("wrong", [3, {1: X}, [{1: X}], [()]])
def test_what_is_no_list_is_left_to_the_call(wrong: Any) -> None:
    assert CallBatch.of_list(wrong, with_target=True).n_inputs > 0 or wrong == [()]


def test_what_has_no_end_is_one_leaf() -> None:
    endless: list[Any] = []
    endless.append(endless)
    assert len(CallBatch.of((endless,), {}).leaves) == 1
