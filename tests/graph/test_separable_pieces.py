"""A refusal of a cut names what holds together, and why."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import pipecompile as pc
from pipecompile.graph.separable_pieces import check_pieces, separable_pieces

X = torch.randn(4, 8)


class Views(nn.Module):
    """A view and its base are both used after a write: no copy can stand for the memory that they share."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.between, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        part = h[:, :4]
        h = h.add_(self.between(h))
        return self.last(h) + part.sum(1, keepdim=True)


def test_a_refusal_names_the_operations_and_the_line_that_ties_them() -> None:
    graph = pc.trace(Views(), X)
    pieces = separable_pieces(graph)
    assert pieces[0].nodes == ("first", "getitem", "between", "add")
    with pytest.raises(pc.PartitionError, match="cannot be cut into 5 stages") as caught:
        check_pieces(graph, 5)
    text = str(caught.value)
    assert "4 pieces can be separated; first ... add (4 operations) hold together" in text
    assert "writes into their memory" in text
    assert "test_separable_pieces.py:" in text
    assert caught.value.hint == "n_stages=4 or fewer"
    check_pieces(graph, 4)


class Nothing(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Counting(nn.Module):
    """Is kept whole: a count decides, which changes in each call."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * float(x.abs().sum())


def test_a_refusal_says_why_the_largest_part_is_kept_whole() -> None:
    with pytest.raises(pc.PartitionError, match="cannot be cut into 3 stages") as caught:
        check_pieces(pc.trace(nn.Sequential(Counting()), X), 3)
    line = Counting.forward.__code__.co_firstlineno + 1
    assert "the recording has 1 operation; 0" in str(caught.value)
    assert "is kept whole: PC102 Python takes a number out of a tensor, at " in str(caught.value)
    assert f"test_separable_pieces.py:{line}: return self.inner(x)" in str(caught.value)


class Between(nn.Module):
    """The items of a tuple are tied to it, and what lies between two of them has to follow."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.middle = nn.BatchNorm1d(8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.middle(self.norm(x)))


@pytest.mark.parametrize(("model", "hint"), [(Nothing(), "n_stages=1"), (Between(), "n_stages=1")], ids=["none", "one"])
def test_hints_are_possible(model: nn.Module, hint: str) -> None:
    with pytest.raises(pc.PartitionError) as caught:
        pc.compile(model, 2, example_args=(X,), n_microbatches=2, devices=["cpu"] * 2, cost="analytic")
    assert caught.value.hint == hint
