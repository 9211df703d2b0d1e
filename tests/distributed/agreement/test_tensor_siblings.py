"""Ranks of `tp` that are asked for different things; siblings.py has the scripts."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from pipecompile.distributed.agreement.call_batch import CallBatch
from pipecompile.distributed.agreement.collective_call import CollectiveCall
from pipecompile.distributed.agreement.tensor_siblings import TensorSiblings
from pipecompile.distributed.collectives import CollectiveGroup
from pipecompile.distributed.communicator import Communicator
from pipecompile.errors import PlanError

SCRIPTS = ["beside siblings"]


class _Siblings(CollectiveGroup):
    """A group of this rank and one that makes another call."""

    ranks, index = (4, 5), 0

    def __init__(self, other: CollectiveCall) -> None:
        self.other = other

    def all_gather(self, row: torch.Tensor) -> torch.Tensor:
        return torch.stack([row, torch.tensor([self.other.key, *self.other.contents(is_due=True)[1:]])])

    def all_gather_text(self, text: str) -> list[str]:
        return [text, self.other.samples() if text.startswith("input") else str(self.other)]


def call(*leaves: torch.Tensor, modes: str = "training") -> CollectiveCall:
    return CollectiveCall("pipe.step", modes, CallBatch.of(leaves, {}, None))


def siblings(other: CollectiveCall, *, has_stages: bool) -> TensorSiblings:
    ranks = SimpleNamespace(tensor_group=None, size=2 if has_stages else 1)
    one = TensorSiblings(cast(Communicator, SimpleNamespace(ranks=ranks)))
    one._group = _Siblings(other)
    return one


X = torch.arange(8.0).view(4, 2)


@pytest.mark.parametrize("other", [call(X), call(torch.zeros(4, 2))])
def test_the_same_call_is_left_as_it_is(other: CollectiveCall) -> None:
    """Zeros may stand for a batch that a rank does not read."""
    own = call(X)
    assert siblings(other, has_stages=True).compared(own, is_due=True) is own


@pytest.mark.parametrize("other", [call(X, modes="in eval mode"), call(X + 1)])
def test_another_call_is_a_part_of_the_call_or_an_error(other: CollectiveCall) -> None:
    compared = siblings(other, has_stages=True).compared(call(X), is_due=True)
    assert compared.modes.startswith("training (beside it in tp, rank 5: ")
    with pytest.raises(PlanError, match="the ranks of tp "):
        siblings(other, has_stages=False).compared(call(X), is_due=True)


@pytest.mark.timeout(700)
@pytest.mark.parametrize("kind", ["eval", "samples"])
def test_one_rank_of_tp_that_differs_is_named_on_all_and_all_go_on(said: dict[str, list[str]], kind: str) -> None:
    """Its sibling saw a closed connection of gloo, before, and other samples were not noticed."""
    for rank, text in enumerate(said["beside siblings"]):
        row: dict[str, Any] = json.loads(text.splitlines()[0].removeprefix("result: "))
        error, goes_on = row[f"{kind}, 2 in pp"]
        assert "Disagreement: the ranks of a pipeline are asked for different things" in error
        assert goes_on, rank
        error, goes_on = row[f"{kind}, 1 in pp"]
        assert "Disagreement: the ranks of tp " in error
        assert "; rank 1: " in error
        assert goes_on, rank
