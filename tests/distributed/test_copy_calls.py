"""The first message of a call of all copies: other calls are told."""

from __future__ import annotations

import pytest
import torch

from pipecompile.distributed.collectives import CollectiveGroup
from pipecompile.distributed.copy_calls import COPY_CALLS, equal_rows_of_copies, rows_of_copies
from pipecompile.errors import PlanError

SCRIPTS = ["one copy clips", "copies clip otherwise", "eval on a copy", "frozen on a copy", "loaded on a copy"]


class Beside(CollectiveGroup):
    """A group of this copy and one that sends `other`."""

    def __init__(self, other: list[float]) -> None:
        self.other = other

    def all_gather(self, row: torch.Tensor) -> torch.Tensor:
        assert len(row) == len(self.other), "every call begins with a row of one width"
        return torch.stack([row, torch.tensor(self.other, dtype=row.dtype)])


def test_the_numbers_of_all_copies_are_returned() -> None:
    assert rows_of_copies(Beside([3.0, 4.0, 0, 0, 0, 0, 0, 0]), "pipe.step", [1.0, 2.0]) == [[1.0, 2.0], [3.0, 4.0]]


@pytest.mark.parametrize("call", COPY_CALLS[1:])
def test_another_call_of_a_copy_is_an_error_with_both(call: str) -> None:
    with pytest.raises(PlanError, match=f"copy 0: {call}; copy 1: pipe.step"):
        rows_of_copies(Beside([8.0, 0, 0, 0, 1.0, 0, 0, 0]), call)


def test_copies_that_clip_otherwise_are_told() -> None:
    equal_rows_of_copies(Beside([1.0, 2.0, 0, 0, 0, 0, 0, 3.0]), "pipe.clip_grad_norm_", [1.0, 2.0])
    with pytest.raises(PlanError, match="copy 0: 1, 2; copy 1: 3, 2"):
        equal_rows_of_copies(Beside([3.0, 2.0, 0, 0, 0, 0, 0, 3.0]), "pipe.clip_grad_norm_", [1.0, 2.0])


@pytest.mark.timeout(700)
def test_a_copy_that_clips_alone_or_otherwise_is_told_in_that_call(said: dict[str, list[str]]) -> None:
    """The weights of copies went apart, before."""
    for text in said["one copy clips"]:
        assert "the copies of the pipeline are asked for different things" in text
        assert "copy 0: pipe.clip_grad_norm_; copy 1: pipe.step" in text
    for text in said["copies clip otherwise"]:
        assert "the copies of the pipeline call pipe.clip_grad_norm_ with other arguments" in text
        assert text.splitlines()[0].endswith(", 1.096329]")


@pytest.mark.timeout(700)
def test_a_copy_in_another_mode_is_told_with_both(said: dict[str, list[str]]) -> None:
    """The gradients of a copy in eval mode, under autocast or of another state were added to those of the others, before."""
    for text in said["eval on a copy"]:
        assert "the copies of the pipeline run a step in other modes" in text
        assert "copy 0: training; copy 1: in eval mode" in text
        assert text.splitlines()[0].endswith("True]")
    assert all(
        "copy 0: training; copy 1: training, after 1 load_state_dict" in text for text in said["loaded on a copy"]
    )


@pytest.mark.timeout(700)
def test_a_parameter_that_is_frozen_on_one_copy_is_told_on_all_ranks(said: dict[str, list[str]]) -> None:
    """The processes ended inside gloo, which was given messages of other sizes, and were said to be killed."""
    for text in said["frozen on a copy"]:
        assert "the copies of the pipeline train other parameters on their ranks" in text
    assert "rank 0: (4, 4), (4,); rank 2: (4,)" in said["frozen on a copy"][0]
