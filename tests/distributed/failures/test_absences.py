"""Ranks note how many pipelines they made and how a thread ended; the error of a rank that waits says so."""

from __future__ import annotations

import pytest
from torch.distributed import HashStore

from pipecompile.distributed.failures.absences import Absences

SCRIPTS = ["compiled once more", "compiled on one", "thread ended", "crossed"]


@pytest.mark.parametrize(
    ("made", "here", "expected"),
    [
        (0, 1, "it has made no pipeline on ranks 4, 5: it has not called compile"),
        (1, 2, "it has made 1 pipeline on ranks 4, 5, and this is number 2 of rank 4: it has not called compile, or not as often"),
        (2, 2, ""),
        (3, 2, "it has made 3 pipelines on ranks 4, 5, and this is number 2 of rank 4: ranks that call them in another order"),
    ],
)  # fmt: skip
def test_a_rank_that_has_made_other_pipelines_is_told(made: int, here: int, expected: str) -> None:
    store = HashStore()
    for number in range(1, made + 1):
        Absences(store, (4, 5), 5, number)
    said = Absences(store, (4, 5), 4, here).of_exchange(5)
    assert said.startswith(expected)
    assert bool(said) == bool(expected)


def test_the_end_of_a_thread_is_noted_by_its_rank_alone() -> None:
    store = HashStore()
    first, second = (Absences(store, (4, 5), rank, 1) for rank in (4, 5))
    second.note_thread("loader", ValueError("bad record 7"))
    assert first.of_wait(5) == "its thread loader has ended by ValueError: bad record 7"
    assert first.of_wait(4) == ""


def test_the_exception_that_a_script_handles_is_noted_until_it_ends() -> None:
    """A rank in a `finally` that waits for all ranks "has been silent", and nothing else was said."""
    store = HashStore()
    first, second = (Absences(store, (4, 5), rank, 1) for rank in (4, 5))
    second.note_handling("ValueError: bad record 7")
    assert first.of_wait(5) == "it is handling ValueError: bad record 7"
    second.note_handling("")
    assert first.of_wait(5) == ""


def test_a_save_is_noted_until_it_ends() -> None:
    store = HashStore()
    first, second = (Absences(store, (4, 5), rank, 1) for rank in (4, 5))
    second.note_save("saved/00000001")
    assert first.of_wait(5) == "it saves the checkpoint saved/00000001, and waits there for all ranks"
    second.note_save("")
    assert first.of_wait(5) == ""


def test_threads_that_outlive_a_script_are_noted() -> None:
    """The rank "has been silent", and nothing else was said."""
    store = HashStore()
    first, second = (Absences(store, (4, 5), rank, 1) for rank in (4, 5))
    second.note_main_end(["wandb-sync"])
    assert first.of_wait(5) == "its script has ended, and its thread wandb-sync runs on"
    second.note_main_end(["a", "b"])
    assert first.of_wait(5) == "its script has ended, and its threads a, b run on"


@pytest.mark.timeout(700)
def test_ranks_with_other_numbers_of_pipelines_are_named(said: dict[str, list[str]]) -> None:
    """Rank 1 "did not take part in the exchange before a program", before."""
    assert (
        "it has made 1 pipeline on ranks 0, 1, and this is number 2 of rank 1: it has not called"
        in said["compiled once more"][1]
    )
    assert "rank 1 failed: " in said["compiled on one"][0]
    assert "it has made no pipeline on ranks 0, 1: it has not called compile" in said["compiled on one"][0]


@pytest.mark.timeout(700)
def test_a_rank_that_is_late_is_reported_with_the_end_of_its_thread(said: dict[str, list[str]]) -> None:
    """It "has been silent", before."""
    text = said["thread ended"][0]
    assert "rank 1 failed before its next call: it has been silent for 5 s; its thread loader has ended by" in text
    assert "ValueError: bad record 7" in text


@pytest.mark.timeout(700)
def test_ranks_that_call_two_pipelines_in_different_orders_are_told_before_the_timeout(
    said: dict[str, list[str]],
) -> None:
    """Each named the other one as silent, after the timeout, before."""
    for rank, text in enumerate(said["crossed"]):
        assert "beside calls of several pipelines in different orders" in text
        assert f"rank {1 - rank} waits for rank {rank} in a call of number {2 - rank}" in text
        assert float(text.splitlines()[-1]) < 12.0
