"""A user's list of micro-batches: the forms of an entry, and what is refused before anything runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pipecompile.batching.microbatch_list import Microbatch, MicrobatchList, read_microbatches
from pipecompile.errors import InputError

X, Y = torch.zeros(3, 4), torch.zeros(3)


def forward(x: torch.Tensor, mask: torch.Tensor | None = None) -> None:
    raise AssertionError("nothing of the model runs")


def packed(tokens: torch.Tensor, offsets: torch.Tensor) -> None:
    raise AssertionError("nothing of the model runs")


def read(entries: Any, *, with_target: bool = True, is_step: bool = True) -> MicrobatchList:
    return read_microbatches(forward, entries, {}, with_target=with_target, is_step=is_step)


@pytest.mark.parametrize("entry", [{"x": X, "target": Y}, (X, Y), [X, Y], Microbatch(X, target=Y)])
def test_the_forms_of_an_entry(entry: Any) -> None:
    listed = read([entry, entry])
    assert listed.sizes == (3, 3)
    assert listed.has_targets
    assert [call.leaves[0] is X for call in listed.calls] == [True, True]
    assert [target is Y for target in listed.targets] == [True, True]


def test_entries_without_a_target() -> None:
    listed = read(iter([X, torch.zeros(2, 9)]), with_target=False)
    assert listed.sizes == (3, 2)
    assert not listed.has_targets
    assert listed.largest_first()[0].leaves[0].shape == (2, 9)
    both = read([(X, X)], with_target=False, is_step=False)
    assert both.calls[0].arguments == ("x", "mask")


def test_the_order_of_keywords_does_not_matter() -> None:
    first, second = read([{"x": X, "mask": X, "target": Y}, {"mask": X, "target": Y, "x": X}]).calls
    assert first.spec == second.spec


def test_offsets_are_no_samples() -> None:
    offsets = torch.tensor([0, 2, 3, 7, 9])
    entries = [{"tokens": torch.zeros(9, 2), "offsets": offsets}]
    (call,) = read_microbatches(packed, entries, {}, with_target=False, is_step=True).calls
    assert call.samples == 9
    assert call.dims == (0, None)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([], "microbatches is empty"),
        ({"x": X, "target": Y}, "microbatches is a dict"),
        (X, "microbatches is a Tensor"),
        (Microbatch(X, target=Y), "microbatches is a Microbatch"),
        (3, "microbatches is an int"),
        ([(X, Y), {"x": X}], "micro-batch 1 has no target"),
        ([(X, Y), {"x": X, "mask": X, "target": Y}], "micro-batch 1 has mask, micro-batch 0 has not"),
        ([{"x": X, "mask": X, "target": Y}, (X, Y)], "micro-batch 0 has mask, micro-batch 1 has not"),
        ([(X, Y), {"x": X, "mask": X[:2], "target": Y}], "micro-batch 1, x: 3, mask: 2"),
    ],
)
def test_what_is_refused(entries: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        read(entries)


def test_a_target_in_some_micro_batches_only() -> None:
    with pytest.raises(InputError, match="micro-batch 1 has no target"):
        read([{"x": X, "target": Y}, {"x": X}], with_target=False)
