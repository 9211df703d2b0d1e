"""The first message of a call of all copies: other calls are told."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from pipecompile.distributed.agreement.copy_calls import COPY_CALLS, equal_rows_of_copies, rows_of_copies
from pipecompile.distributed.collectives import CollectiveGroup
from pipecompile.errors import PlanError

SCRIPTS = ["one copy clips", "copies clip otherwise", "eval on a copy", "frozen on a copy", "loaded on a copy"]
SCRIPTS += ["updates", "updates of copies", "other layers of copies"]


class Beside(CollectiveGroup):
    """A group of this copy and one that sends `other`."""

    def __init__(self, other: list[float]) -> None:
        self.other = other

    def all_gather(self, row: torch.Tensor) -> torch.Tensor:
        assert len(row) == len(self.other), "every call begins with a row of one width"
        return torch.stack([row, torch.tensor(self.other, dtype=row.dtype)])


def test_the_numbers_of_all_copies_are_returned() -> None:
    assert rows_of_copies(Beside([3.0, 4.0, *[0.0] * 9]), "pipe.step", [1.0, 2.0]) == [[1.0, 2.0], [3.0, 4.0]]


@pytest.mark.parametrize("call", COPY_CALLS[1:])
def test_another_call_of_a_copy_is_an_error_with_both(call: str) -> None:
    with pytest.raises(PlanError, match=f"copy 0: {call}; copy 1: pipe.step"):
        rows_of_copies(Beside([8.0, 0, 0, 0, 1.0, *[0.0] * 6]), call)


def test_copies_that_clip_otherwise_are_told() -> None:
    equal_rows_of_copies(Beside([1.0, 2.0, *[0.0] * 8, 3.0]), "pipe.clip_grad_norm_", [1.0, 2.0])
    with pytest.raises(PlanError, match="copy 0: 1, 2; copy 1: 3, 2"):
        equal_rows_of_copies(Beside([3.0, 2.0, *[0.0] * 8, 3.0]), "pipe.clip_grad_norm_", [1.0, 2.0])


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
    assert "rank 0: 0.weight; rank 2: none of these" in said["frozen on a copy"][0]


@pytest.mark.timeout(700)
def test_copies_that_freeze_other_layers_of_one_shape_are_told(said: dict[str, list[str]]) -> None:
    """The gradients of one layer were added to those of another, without a word, before."""
    for text in said["other layers of copies"]:
        assert "the copies of the pipeline train other parameters on their ranks" in text
    assert "rank 0: 0.0.weight, 0.0.bias; rank 2: 0.1.weight, 0.1.bias" in said["other layers of copies"][0]


def warned(said: dict[str, list[str]], name: str) -> list[dict[str, Any]]:
    """Return, per rank, what it was warned of in each script of updated_weights.py."""
    return [json.loads(text.splitlines()[0].removeprefix("result: ")) for text in said[name]]


@pytest.mark.timeout(700)
@pytest.mark.parametrize(
    ("script", "told"),
    [
        ("skipped", "rank 0: 1 step of AdamW for 0.weight and what else it trains; rank 1: no step of an optimizer for 2.weight"),
        ("twice", "rank 1: 2 steps of AdamW for 2.weight"),
        ("plateau", "lr x 0.5 for 2.weight"),
        ("rate", "rank 1: 1 step of AdamW(lr=0.02, "),
    ],
)  # fmt: skip
def test_a_rank_that_updates_its_weights_differently_is_told_once(
    said: dict[str, list[str]], script: str, told: str
) -> None:
    """A model was trained in part, without a word, before."""
    for rank in warned(said, "updates"):
        assert [text.partition(":")[0] for text in rank[script]] == [
            "the ranks update their weights differently since the last call"
        ]
        assert told in rank[script][0]


@pytest.mark.timeout(700)
def test_ranks_that_clip_by_norms_of_their_own_are_told(said: dict[str, list[str]]) -> None:
    """They were told for iterators of parameters alone, before."""
    for rank in warned(said, "updates"):
        assert [text.partition(":")[0] for text in rank["clipped"]] == ["the ranks scale their gradients differently"]
        assert "rank 0: by 0.298 (0.weight ...); rank 1: by 0.228 (2.weight ...)" in rank["clipped"][0]
        assert "InputError: torch.optim.LBFGS is given the parameters of a pipeline" in rank["searched"]


@pytest.mark.timeout(700)
def test_a_rank_that_leaves_out_zero_grad_is_told(said: dict[str, list[str]]) -> None:
    """Its part of the model was trained by sums of the gradients of all steps, without a word, before."""
    for rank in warned(said, "updates"):
        assert [text.partition(":")[0] for text in rank["kept"]] == ["the ranks clear their gradients differently"]
        assert "rank 0: cleared (0.weight ...); rank 1: kept (2.weight ...)" in rank["kept"][0]


@pytest.mark.timeout(700)
def test_a_hook_on_a_weight_of_two_ranks_scales_each_part_once_and_is_warned_of(said: dict[str, list[str]]) -> None:
    """The part of the second rank was halved twice, without a word, before."""
    for rank in warned(said, "updates"):
        off, text = rank["hooked"]
        assert off < 1e-7
        assert "hooks on the gradient of last.weight run once per stage and micro-batch" in text


@pytest.mark.timeout(700)
@pytest.mark.parametrize("script", ["alike", "clipped together", "by hand", "by layer"])
def test_what_ranks_may_do_is_not_warned_of(said: dict[str, list[str]], script: str) -> None:
    assert [rank[script] for rank in warned(said, "updates")] == [[], []]


@pytest.mark.timeout(700)
def test_a_copy_with_weights_of_its_own_is_told(said: dict[str, list[str]]) -> None:
    """Copies went apart, without a word, before."""
    ranks = warned(said, "updates of copies")
    for number, rank in enumerate(ranks):
        values = (
            "0.weight, 0.bias: rank 0: values 1; rank 2"
            if number % 2 == 0
            else "2.weight, 2.bias: rank 1: values 1; rank 3"
        )
        assert [f"the copies of the pipeline have other values of {values}" in text for text in rank["dp skipped"]] == [
            False,
            True,
        ]
        for kind in ("dp", "dp_shard"):
            assert f"rank {number % 2 + 2}: no step of an optimizer for" in rank[f"{kind} skipped"][0]
            assert rank[f"{kind} clipped_together"] == []
        told = [
            text for text in rank["dp loaded"] if "other values of 2.bias: rank 1: values 1; rank 3: values 2" in text
        ]
        assert len(told) == number % 2
