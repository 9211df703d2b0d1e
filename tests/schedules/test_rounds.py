from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipecompile.schedules.rounds import depth_first, microbatch_rounds


@pytest.mark.parametrize(
    ("m", "p", "sizes"), [(8, 4, [4, 4]), (11, 4, [6, 5]), (10, 4, [5, 5]), (3, 4, [3]), (1, 1, [1]), (5, 2, [3, 2])]
)
def test_rounds_are_as_equal_as_can_be(m: int, p: int, sizes: list[int]) -> None:
    assert [len(part) for part in microbatch_rounds(m, p)] == sizes


@given(st.integers(1, 60), st.integers(1, 12))
def test_rounds_have_every_micro_batch_once_and_are_no_shorter_than_there_are_devices(m: int, p: int) -> None:
    parts = microbatch_rounds(m, p)
    assert [index for part in parts for index in part] == list(range(m))
    assert min(map(len, parts)) >= min(m, p)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_a_round_goes_through_the_stages_before_the_next() -> None:
    assert " ".join(map(str, depth_first([1, 3], "F", [range(2), range(2, 3)]))) == "1F0 1F1 3F0 3F1 1F2 3F2"
