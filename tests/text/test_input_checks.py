from __future__ import annotations

from math import inf, nan
from pathlib import Path

import numpy as np
import pytest

from pipecompile.errors import InputError, ScheduleError
from pipecompile.text.input_checks import (
    amount,
    amounts,
    checked_count,
    file_path,
    float_of,
    json_text,
    known_names,
    place_text,
    whole,
    without_mark,
)


def test_numbers_become_pythons() -> None:
    assert whole("n", np.int64(3)) == 3
    assert type(whole("n", np.int64(3))) is int
    assert type(amount("x", np.float32(0.5))) is float
    assert amount("x", inf, finite=False) == inf
    assert amounts("x", 2, 3, "stage") == (2.0, 2.0, 2.0)
    assert amounts("x", np.array([1.0, 2.0]), 2, "stage") == (1.0, 2.0)


@pytest.mark.parametrize("value", [0, -1, True, 1.5, nan, "3", None, [1]])
def test_what_is_no_count_is_refused(value: object) -> None:
    with pytest.raises(InputError, match=r"n=.* is not a whole number of at least 1\n  try    n=4"):
        whole("n", value)


@pytest.mark.parametrize("value", [-1.0, nan, inf, 10**400, True, "3", None, [1.0]])
def test_what_is_no_amount_is_refused(value: object) -> None:
    with pytest.raises(InputError, match=r"x=.* is not a finite number of at least 0"):
        amount("x", value)
    with pytest.raises(InputError, match="x=0 is not a number above 0"):
        amount("x", 0, zero=False, finite=False)


def test_amounts_whose_sums_or_quotients_are_not_finite_are_refused() -> None:
    with pytest.raises(InputError, match=r"x=1e\+308 is more than 1e\+100"):
        amount("x", 1e308)
    with pytest.raises(InputError, match="x=5e-324 is less than 1e-100"):
        amount("x", 5e-324, zero=False, finite=False)
    assert (amount("x", 1e100), amount("x", 5e-324), amount("x", inf, finite=False)) == (1e100, 5e-324, inf)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([1.0], "x has 1 number for 2 stages\n  try    one number, or one per stage"),
        ([1.0, nan], r"x\[1\]=nan is not a finite number"),
        ("12", "x='12' is not a number, nor one per stage"),
        ({0: 1.0, 1: 2.0}, "is not a number, nor one per stage"),
        (None, "x=None is not a number, nor one per stage"),
        (True, "x=True is not a number, nor one per stage"),
    ],
)
def test_the_entry_is_named(value: object, message: str) -> None:
    with pytest.raises(InputError, match=message):
        amounts("x", value, 2, "stage")


def test_a_mistyped_name_comes_with_the_one_it_is_like() -> None:
    known_names("the cost", ["forward"], ["forward", "backward"])
    with pytest.raises(InputError, match=r"the cost 'foward' is not known\n  why    known are .*\n  try    forward"):
        known_names("the cost", ["foward"], ["backward", "forward"])


def test_a_text_has_as_many_items_as_its_header_counts() -> None:
    assert checked_count(1000, 3, "stages") == 1000
    assert checked_count(5000, 5000, "stages") == 5000
    with pytest.raises(ScheduleError, match="the text has 1 action and cannot have 1,001 stages"):
        checked_count(1001, 1, "stages")


def test_a_mark_is_removed_once() -> None:
    assert without_mark("\ufeff{}") == without_mark("{}") == "{}"
    assert without_mark(b"\xef\xbb\xbf{}") == b"{}"


def test_numbers_beyond_all_floats_are_infinite() -> None:
    assert (float_of(10**400), float_of(-(10**400))) == (inf, -inf)
    with pytest.raises(InputError, match="n=7 is more than 5"):
        whole("n", 7, most=5)


def test_names_may_be_anything() -> None:
    for name in ([], np.array(["a", "b"]), None):
        with pytest.raises(InputError, match=r"the cost .* is not known"):
            known_names("the cost", [name], ["a"])


def test_json_is_a_text() -> None:
    assert json_text("\ufeff[]") == "[]"
    with pytest.raises(InputError, match="a NoneType is not JSON text"):
        json_text(None)


class Strange:
    def __fspath__(self) -> str:
        raise RuntimeError


@pytest.mark.parametrize("value", [None, 3, Strange(), "a\0b", b"ab", "\ud800", Path("a/\ud800")])
def test_what_names_no_file_is_no_path(value: object) -> None:
    with pytest.raises(InputError, match=r"out=.* is not a path"):
        file_path("out", value)


def test_a_name_that_no_file_can_have_is_too_long_for_a_path() -> None:
    for value in ("x" * 256, f"out/{'x' * 256}/y", "ä" * 128, "/".join(["x" * 200] * 30)):
        with pytest.raises(InputError, match=r"out=.* is too long for a path\n  why    a name has at most 255 bytes"):
            file_path("out", value)
    for value in ("x" * 255, "/".join(["x" * 200] * 20), "a\udc80", "."):
        assert file_path("out", value) == Path(value)


def test_a_place_is_a_text_or_a_path() -> None:
    assert (place_text("line 3"), place_text(Path("a/b"))) == ("line 3", "a/b")
    with pytest.raises(InputError, match=r"where=\[a number of thousands of digits\] is not text"):
        place_text([10**5000])
