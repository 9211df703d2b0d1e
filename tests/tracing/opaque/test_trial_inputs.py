"""Inputs of trial runs keep what an index may be, and change what data may be."""

from __future__ import annotations

import pytest
import torch

from pipecompile.tracing.opaque.trial_inputs import DataChange, vary_input


def test_samples_are_taken_and_repeated() -> None:
    x = torch.arange(3.0).reshape(3, 1)
    assert vary_input(x, 0, 2, change=DataChange.NONE).flatten().tolist() == [0, 1]
    assert vary_input(x, 0, 5, change=DataChange.NONE).flatten().tolist() == [0, 1, 2, 2, 2]
    assert vary_input("text", 0, 2, change=DataChange.WILD) == "text"


@pytest.mark.parametrize("change", [DataChange.LIKELY, DataChange.WILD])
def test_data_change_and_the_example_does_not(change: DataChange) -> None:
    x = torch.rand(4, 3, requires_grad=True)
    before = x.detach().clone()
    varied = vary_input(x, 0, 4, change=change)
    assert varied.requires_grad
    assert varied.shape == x.shape
    assert not torch.equal(varied, x)
    assert torch.equal(x.detach(), before)


def test_integers_that_may_be_indices_are_rotated_within_a_sample() -> None:
    x = torch.tensor([[0, 1, 2], [3, 4, 5]])
    varied = vary_input(x, 0, 2, change=DataChange.WILD)
    assert sorted(varied.flatten().tolist()) == [0, 1, 2, 3, 4, 5]
    assert varied.tolist() == [[5, 3, 4], [2, 0, 1]]


def test_integers_are_drawn_from_those_of_the_input() -> None:
    x = torch.tensor([[7, 9], [9, 9], [7, 7]])
    assert set(vary_input(x, 0, 8, change=DataChange.DRAWN).flatten().tolist()) == {7, 9}
    ones = torch.ones(4, 2, dtype=torch.long)
    assert set(vary_input(ones, 0, 8, change=DataChange.DRAWN).flatten().tolist()) == {0, 1}
    assert vary_input(ones == 1, 0, 8, change=DataChange.DRAWN).dtype is torch.bool
