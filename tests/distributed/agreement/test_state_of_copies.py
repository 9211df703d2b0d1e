"""Copies that compute with other attributes, code or globals than each other; read_values.py has the scripts."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pipecompile.distributed.agreement.state_of_copies import StateOfCopies

SCRIPTS = ["read otherwise"]


@pytest.fixture(scope="module")
def warned(said: dict[str, list[str]]) -> list[dict[str, list[str]]]:
    return [json.loads(text.splitlines()[0].removeprefix("result: ")) for text in said["read otherwise"]]


@pytest.mark.timeout(700)
@pytest.mark.parametrize(
    ("kind", "texts"),
    [
        ("attribute", ["model.scale = 1.0, read at read_values.py", "model.scale = 3.0"]),
        ("code", ["Scaled.forward = Scaled.forward (read_values.py:", "Scaled.forward is not read"]),
        ("loss", ["loss_fn: FACTOR", "= 2.0", "= 4.0"]),
        ("from the start", ["model.scale = 1.0", "model.scale = 2.0"]),
    ],
)
def test_what_one_copy_alone_reads_is_told_once_on_all_ranks(
    warned: list[dict[str, list[str]]], kind: str, texts: list[str]
) -> None:
    """The copies trained other functions without a word, before."""
    for rank, row in enumerate(warned):
        (text,) = row[kind]
        assert "the copies of the pipeline compute with other values" in text
        assert f"rank {rank % 2}: " in text
        assert f"rank {rank % 2 + 2}: " in text
        assert [part for part in texts if part not in text] == []


@pytest.mark.parametrize("kind", ["on all", "other lengths"])
def test_a_change_on_all_and_a_rank_that_nothing_is_computed_with_are_not_told(
    warned: list[dict[str, list[str]]], kind: str
) -> None:
    assert [row[kind] for row in warned] == [[]] * 4


def test_nothing_is_compared_without_recordings() -> None:
    class Group:
        def all_gather_text(self, _: str) -> Any:
            raise AssertionError

    state, group = StateOfCopies(), Group()
    assert state.digest() == 0.0
    state.compare(group, [0.0, 5.0])  # type: ignore[arg-type]
    state.compare(group, [5.0, 5.0])  # type: ignore[arg-type]
