"""A loss on ranks that reads tensors which stages on other ranks leave on the model: loss and gradients are those of one process."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.distributed.left_for_loss import CASES
from tests.support.warm_python import WarmPython


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory, warm_python: WarmPython) -> list[dict[str, Any]]:
    """What both ranks found."""
    folder = tmp_path_factory.mktemp("ranks")
    warm_python.run("tests.distributed.left_for_loss", str(folder))
    return [json.loads((folder / str(rank)).read_text()) for rank in range(2)]


@pytest.mark.parametrize("case", CASES)
def test_losses_and_gradients_are_those_of_one_process(case: str, said: list[dict[str, Any]]) -> None:
    found = [one[case] for one in said]
    assert max(one["apart"] for one in found) < 1e-12
    assert min(one["gradients"] for one in found) > 4
    assert [one["warned"] for one in found] == [[], []]


def test_the_last_rank_has_what_the_last_micro_batch_left(said: list[dict[str, Any]]) -> None:
    assert said[1]["1f1b"]["left"] == pytest.approx(said[1]["1f1b"]["wanted"], rel=1e-12)


def test_what_the_loss_does_not_name_is_not_sent(said: list[dict[str, Any]]) -> None:
    assert said[0]["dicts"]["left"] is not None
    assert said[1]["dicts"]["left"] is None


def test_a_list_of_another_rank_is_named(said: list[dict[str, Any]]) -> None:
    assert all("leaves 'seen' on objects that the loss reads" in text for one in said for text in one["lists"])
    assert all(one["lists"] for one in said)
