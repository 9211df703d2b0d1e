"""Ranks whose models begin with other values are warned: each stage begins with those of its own rank."""

from __future__ import annotations

import pytest

from pipecompile.distributed.agreement.first_values import _other_names, _text

SCRIPTS = ["other seeds", "other seeds of copies"]


def test_tensors_that_all_ranks_have_are_compared() -> None:
    rows = [{"a": 1, "b": 2, "here": 3}, {"a": 1, "b": 4}]
    assert _other_names(rows) == ["b"]
    assert "other values of a, b, c and 1 more, of 5 tensors" in _text(["a", "b", "c", "d"], 5)


@pytest.mark.timeout(700)
def test_ranks_with_other_seeds_are_warned_once(said: dict[str, list[str]]) -> None:
    """A seed, or a checkpoint, on one rank alone trained a model that no rank had, without a word. Constants, and a copy of a pipeline, count not."""
    for text in said["other seeds"]:
        assert (
            text.count("the ranks begin with other values of 0.weight, 0.bias, 2.weight and 1 more, of 4 tensors") == 1
        )
        assert text.startswith("result: (True, [")


@pytest.mark.timeout(700)
def test_copies_with_other_seeds_take_those_of_the_first(said: dict[str, list[str]]) -> None:
    assert [text.splitlines()[0] for text in said["other seeds of copies"]] == ["result: (True, [])"] * 4
