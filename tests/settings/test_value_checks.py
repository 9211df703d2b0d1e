"""Checks of single arguments: canonical values pass, others are refused by a message of one form."""

from __future__ import annotations

import pickle
import re
from dataclasses import dataclass, replace
from typing import Annotated, Any

import numpy as np
import pytest
import torch

from pipecompile.errors import InputError, ScheduleError
from pipecompile.settings.value_checks import (
    Group,
    checks_of,
    choice,
    entries,
    flag,
    function,
    near,
    number,
    refusal,
    whole_number,
)

NAN, INF = float("nan"), float("inf")


def test_a_refusal_has_the_argument_its_value_and_what_is_accepted() -> None:
    error = refusal("pin", 3, "a mapping", where="here", hint="pin={}", kind=ScheduleError)
    assert str(error) == "pin=3 is not a mapping\n  where  here\n  try    pin={}"
    assert isinstance(error, ScheduleError)


@pytest.mark.parametrize(
    ("name", "nearest"), [("maen", "mean"), ("smu", "sum"), ("zzz", "mean"), (3, "mean"), ("SUM", "sum")]
)
def test_the_nearest_name_is_proposed_and_else_the_first(name: object, nearest: str) -> None:
    assert near(name, ["mean", "sum"]) == nearest


def refused(check: Any, value: object) -> bool:
    """Return whether a check refuses a value, by a message that names the argument and proposes a value."""
    try:
        check("name", value)
    except InputError as error:
        return error.what.startswith("name=") and error.hint.startswith("name=")
    return False


@pytest.mark.parametrize("value", [1, 7, np.int64(3), np.uint8(3)])
def test_whole_numbers_become_ints(value: Any) -> None:
    assert type(whole_number(4)("name", value)) is int
    assert whole_number(4)("name", value) == value


@pytest.mark.parametrize("value", [0, -1, 1.0, True, "1", None, [1], np.bool_(True), np.float64(1), torch.tensor(1)])
def test_other_values_are_no_whole_number(value: object) -> None:
    assert refused(whole_number(4), value)


def test_a_whole_number_may_be_a_name_or_none_where_these_are_accepted() -> None:
    check = whole_number(8, "auto", None)
    assert [check("n", value) for value in (3, "auto", None)] == [3, "auto", None]
    with pytest.raises(InputError, match=r"(?s)of at least 1, nor 'auto'.*try    n=8, or n='auto'"):
        check("n", "atuo")
    assert whole_number(0, least=0)("n", 0) == 0


def test_numbers_become_ints_or_floats_and_must_be_above_zero() -> None:
    assert [type(number(1)("n", value)) for value in (2, np.int64(2), 2.5, np.float32(2.5))] == [int, int, float, float]
    assert all(refused(number(1), value) for value in (0, -1.0, NAN, INF, True, "1", None, 1j))
    assert number(1, zero=True)("n", 0) == 0
    assert number(1, finite=False)("n", INF) == INF
    assert refused(number(1, zero=True, finite=False), NAN)


def test_a_whole_number_beyond_all_floats_is_infinite() -> None:
    assert refused(number(1), 10**400)
    assert refused(number(1, finite=False), -(10**400))
    assert number(1, finite=False)("n", 10**400) == INF
    assert type(number(1, finite=False)("n", 10**400)) is float


@pytest.mark.parametrize(("value", "fault"), [(1e308, "more than 1e[+]40"), (5e-324, "less than 1e-40")])
def test_a_number_whose_quotients_are_not_finite_is_refused_by_name(value: float, fault: str) -> None:
    with pytest.raises(InputError, match=f"(?s)n={re.escape(str(value))} is {fault}.*not finite"):
        number(1, finite=False)("n", value)
    with pytest.raises(InputError, match=f"(?s)n=\\S+ is {fault}.*entry 1: {re.escape(str(value))}"):
        entries("n", [1.0, value], number(1), "numbers", "n=[1.0]")
    assert (number(1)("n", 1e40), number(1)("n", 1e-40), number(1, zero=True)("n", 5e-324)) == (1e40, 1e-40, 5e-324)


@pytest.mark.parametrize("value", [10**5000, [10**5000], {"x": 10**5000}], ids=["number", "list", "dict"])
def test_a_value_that_python_cannot_write_is_refused_by_every_check(value: object) -> None:
    checks = (whole_number(4, most=9), number(1), choice("a", "b"), flag, function("square"))
    assert all(refused(check, value) for check in checks)


def test_a_choice_is_one_of_its_names_and_a_mistyped_one_gets_the_nearest() -> None:
    check = choice(None, "each", "deferred")
    assert [check("norm", value) for value in (None, "each")] == [None, "each"]
    with pytest.raises(
        InputError, match=r"(?s)norm='defered' is not known.*None, 'each', 'deferred'.*try    norm='deferred'"
    ):
        check("norm", "defered")
    assert all(refused(check, value) for value in (True, 0, ["each"], torch.ones(2)))


def test_a_flag_is_a_bool() -> None:
    assert (flag("f", True), flag("f", np.bool_(False))) == (True, False)
    assert type(flag("f", np.bool_(False))) is bool
    assert all(refused(flag, value) for value in (0, 1, None, "yes", [True]))


def test_a_function_is_whatever_can_be_called() -> None:
    check = function("square")
    assert check("f", len) is len
    assert check("f", None) is None
    with pytest.raises(InputError, match=r"(?s)f='square' is not a function.*try    f=square"):
        check("f", "square")


def test_entries_are_checked_one_by_one_and_the_first_bad_one_is_named() -> None:
    def checked(value: object) -> tuple[Any, ...]:
        return entries("speeds", value, number(1), "numbers", "speeds=[1.0]")

    assert checked([1, np.float64(2)]) == checked(np.array([1.0, 2.0])) == (1, 2)
    assert checked(range(1, 3)) == (1, 2)
    with pytest.raises(InputError, match=r"(?s)speeds=\(1, 'x', 'y'\) is not numbers.*where  entry 1: 'x'"):
        checked([1, "x", "y"])
    for value in ("12", b"12", {1: 2}, 3, None):
        with pytest.raises(InputError, match="is not numbers"):
            checked(value)


@dataclass(frozen=True, kw_only=True)
class Counted(Group):
    count: Annotated[int, whole_number(4)]
    free: object = None


@dataclass(frozen=True, kw_only=True)
class Named(Group):
    name: Annotated[str, choice("a", "b")]


@dataclass(frozen=True, kw_only=True)
class Both(Counted, Named):
    pass


def test_a_field_is_made_canonical_and_a_field_without_a_check_stays() -> None:
    group = Both(count=np.int64(3), name="a", free=np.int64(3))  # type: ignore[arg-type]
    assert type(group.count) is int
    assert type(group.free) is np.int64


def test_all_bases_have_their_checks() -> None:
    assert set(checks_of(Both)) == {"count", "name"}
    for values in ({"count": 0, "name": "a"}, {"count": 1, "name": "c"}):
        with pytest.raises(InputError):
            Both(**values)  # type: ignore[arg-type]


def test_a_replacement_is_checked_too() -> None:
    with pytest.raises(InputError, match="count=0"):
        replace(Counted(count=1), count=0)


def test_a_group_can_be_sent() -> None:
    group = Both(count=2, name="b")
    assert pickle.loads(pickle.dumps(group)) == group
