"""The weights and losses of parts of a batch, without processes. test_replicas.py has whole steps of two replicas."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import isnan
from typing import cast

import pytest
import torch
from torch import nn

from pipecompile.distributed.agreement.state_of_copies import StateOfCopies
from pipecompile.distributed.agreement.weights_of_copies import WeightsOfCopies
from pipecompile.distributed.collectives import CollectiveGroup
from pipecompile.distributed.communicator import Communicator
from pipecompile.distributed.data_parallel.gradient_reduction import GradientReduction
from pipecompile.distributed.data_parallel.held_gradients import HeldGradients
from pipecompile.distributed.data_parallel.sharded_parameters import ShardedParameters
from pipecompile.errors import PlanError


class Rows(CollectiveGroup):
    """A group whose other ranks send rows that are made of this rank's one by `others`, in turn."""

    def __init__(self, *others: Sequence[dict[int, float]]) -> None:
        self.others = iter(others)

    def all_gather(self, row: torch.Tensor) -> torch.Tensor:
        changes = next(self.others)
        rows = [row, *(row.clone() for _ in changes)]
        for other, change in zip(rows[1:], changes, strict=True):
            for place, value in change.items():
                other[place] = value
        return torch.stack(rows)

    ranks = (4, 5)

    def all_gather_text(self, text: str) -> list[str]:
        return [text, '["bias"]']


def reduction(samples: float | None, *others: Sequence[dict[int, float]]) -> GradientReduction:
    def parameters() -> Iterator[nn.Parameter]:
        return iter([nn.Parameter(torch.ones(2))])

    shards = ShardedParameters(None, cast(Communicator, None))
    return GradientReduction(Rows(*others), shards, parameters, samples, HeldGradients())


def test_a_part_is_weighted_by_its_samples() -> None:
    step = reduction(6, [{0: 4.0}, {0: 2.0}])
    step.agree("a program", "", WeightsOfCopies(), StateOfCopies())
    assert step.share == 0.5
    assert step.is_alike


def test_a_part_without_samples_weighs_nothing_and_gets_the_loss_in_its_dtype() -> None:
    step = reduction(None, [{4: 1.0}], [{0: 0.75, 1: 2.0}])
    step.agree(None, "", WeightsOfCopies(), StateOfCopies())
    assert (step.share, step.is_alike) == (0.0, False)
    assert torch.equal(step.loss_of_batch(None), torch.tensor(0.75, dtype=torch.bfloat16))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("is_alike", [True, False])
def test_losses_of_all_dtypes_are_summed_in_one(dtype: torch.dtype, is_alike: bool) -> None:
    """Targets of one copy alone may have another dtype; gloo aborted, or added bits of another format."""
    sums: list[torch.dtype] = []

    def with_others(tensor: torch.Tensor) -> torch.Tensor:
        sums.append(tensor.dtype)
        return tensor + 0.25

    step = reduction(None, [{0: 0.25, 1: 1.0}])
    step.is_alike, step.group.sum = is_alike, with_others  # type: ignore[method-assign]
    loss = step.loss_of_batch(torch.tensor(0.5, dtype=dtype))
    assert (loss.item(), loss.dtype) == (0.75, dtype)
    assert sums == [torch.float64] * is_alike


def test_the_divisor_of_a_loss_that_counts_nothing_is_its_floor() -> None:
    step = reduction(0.0, [{0: 0.0}])
    step.floor = 1.0
    step.agree("a program", "", WeightsOfCopies(), StateOfCopies())
    assert step.share == 1.0
    nothing = reduction(0.0, [{0: 0.0}])
    nothing.agree("a program", "", WeightsOfCopies(), StateOfCopies())
    assert isnan(nothing.share)


@pytest.mark.parametrize(
    ("program", "others", "text"),
    [
        (None, [[{}]], "the batch is empty"),
        ("a", [[{3: 1.0}]], "count other things"),
        ("a", [[{5: 1.0}]], "run a step in other modes"),
        ("a", [[{6: 1.0}]], "frozen on one copy alone"),
        ("a", [[{2: 1.0, 6: 1.0}]], "a recording of one copy alone"),
    ],
)
def test_copies_that_cannot_step_together_raise(
    program: str | None, others: list[list[dict[int, float]]], text: str
) -> None:
    with pytest.raises(PlanError, match=text):
        reduction(2, *others).agree(program, "", WeightsOfCopies(), StateOfCopies())
