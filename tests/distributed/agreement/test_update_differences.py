"""What is warned of, of the updates of two or three ranks; test_copy_calls.py has ranks that are processes."""

from __future__ import annotations

import warnings

import pytest

from pipecompile.distributed.agreement.update_differences import UpdateDifferences
from pipecompile.distributed.agreement.weight_updates import Updates


def updates(*settings: str, steps: int = 1, factor: float | None = 1.0, is_kept: bool | None = None) -> Updates:
    return Updates(steps if settings else 0, settings, factor, "0.weight", bool(settings), is_kept)


def told(*each: Updates | None, differences: UpdateDifferences | None = None) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        (differences or UpdateDifferences()).warn(range(4, 4 + len(each)), each)
    return [str(one.message) for one in caught]


@pytest.mark.parametrize(
    "each",
    [
        (updates("A"), updates("A")),
        (updates("A"), None, updates("A")),  # nothing is trained there
        (updates("A", "B"), updates("A"), updates("A", "C")),  # an optimizer for a part
        (updates(), updates(), None),
        (updates("A"), Updates(0, (), None, "2.weight", True)),  # weights are updated by hand there
        (updates("A", factor=0.5), updates("A", factor=0.505), updates("A", factor=None)),
        (
            updates("A", is_kept=True),
            updates("A", is_kept=True),
            updates("A"),
        ),  # gradients there are zero by themselves
        (updates("A", is_kept=False), Updates(0, (), None, "2.weight", True, True)),  # no optimizer has them
    ],
)
def test_ranks_that_may_be_meant_are_not_told(each: tuple[Updates | None, ...]) -> None:
    assert told(*each) == []


@pytest.mark.parametrize(
    ("each", "text"),
    [
        ((updates("A"), updates()), "rank 4: 1 step of A for 0.weight and what else it trains; rank 5: no step of an optimizer"),
        ((updates("A"), updates("A", steps=2)), "rank 5: 2 steps of A for 0.weight"),
        ((updates("A(lr=1)"), updates("A(lr=2)")), "rank 4: 1 step of A(lr=1) for 0.weight and what else it trains; rank 5: 1 step of A(lr=2)"),
        ((updates("A", factor=0.5), None, updates("A", factor=0.2)), "rank 4: by 0.5 (0.weight ...); rank 6: by 0.2 (0.weight ...)"),
        ((updates("A", is_kept=False), updates("A"), updates("A", is_kept=True)), "rank 4: cleared (0.weight ...); rank 5: unknown (0.weight ...); rank 6: kept"),
    ],
)  # fmt: skip
def test_each_rank_says_what_it_did(each: tuple[Updates | None, ...], text: str) -> None:
    (warning,) = told(*each)
    assert text in warning


def test_each_kind_is_told_once() -> None:
    differences = UpdateDifferences()
    assert len(told(updates("A"), updates(), differences=differences)) == 1
    assert told(updates(), updates("A"), differences=differences) == []
    assert len(told(updates("A", factor=3.0), updates("A"), differences=differences)) == 1
