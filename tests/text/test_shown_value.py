from __future__ import annotations

import collections
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from pipecompile.ir.action import Action, Kind
from pipecompile.text.shown_value import MOST, shown, type_text

MANY_DIGITS = "a number of thousands of digits"


class Mute:
    """Nothing that Python asks of it has an answer."""

    def __repr__(self) -> str:
        raise RuntimeError

    __str__ = __repr__


class Worded(int):
    def __repr__(self) -> str:
        return 3  # type: ignore[return-value]


class Lengthy(complex):
    def __repr__(self) -> str:
        return "x" * 10**6


class Endless(list[Any]):
    def __iter__(self) -> Iterator[Any]:
        while True:
            yield self


class Uncounted(dict[Any, Any]):
    def items(self) -> Any:
        raise KeyError(self)


class Impostor:
    """An object that says to be a class."""

    @property
    def __class__(self) -> Any:
        return type


@dataclass
class Couple:
    one: Any
    two: Any


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "None"), (True, "True"), (-3, "-3"), (1.5, "1.5"), ("a'b", '"a\'b"'), (b"x", "b'x'"), (..., "Ellipsis"),
        ([1, "x"], "[1, 'x']"), ((1,), "(1,)"), ((), "()"), ({"a": [1]}, "{'a': [1]}"), ({3}, "{3}"), (set(), "set()"),
        (frozenset({3}), "frozenset({3})"), (range(2), "range(0, 2)"), (len, "len"), (nn.Linear, "Linear"), ([int], "[int]"),
        (torch.device("cpu"), "device(type='cpu')"), (torch.float32, "torch.float32"), (Path("a/b"), "'a/b'"),
        (np.float64(2.0), "np.float64(2.0)"), (Fraction(1, 2), "Fraction(1, 2)"), (Decimal("0.5"), "Decimal('0.5')"),
        (Action(1, Kind.FORWARD, 10**5000), f"Action(stage=1, kind=Kind.FORWARD, microbatch={MANY_DIGITS}, slice=-1)"),
        (torch.ones(3), "<Tensor>"), (np.ones(3), "<ndarray>"), (object(), "<object>"), (nn.Linear(1, 1), "<Linear>"),
        (Couple(1, [2]), "Couple(one=1, two=[2])"), (Couple, "Couple"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",  # pytest would write the value
)  # fmt: skip
def test_values_are_shown_as_a_user_writes_them(value: object, text: str) -> None:
    assert shown(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (10**5000, MANY_DIGITS), (-(10**5000), MANY_DIGITS), ([10**5000], f"[{MANY_DIGITS}]"), ({10**5000: 1}, f"{{{MANY_DIGITS}: 1}}"),
        (Fraction(10**5000), "<Fraction>"), (Mute(), "<Mute>"), ([Mute()], "[<Mute>]"), ({Mute(): Mute()}, "{<Mute>: <Mute>}"),
        (Worded(3), "<Worded>"), (Lengthy(), "x" * 77 + "..."), (Uncounted(a=1), "<Uncounted>"), (Impostor(), "<Impostor>"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",  # pytest would write the value
)  # fmt: skip
def test_what_cannot_be_written_is_shown_all_the_same(value: object, text: str) -> None:
    assert shown(value) == text


def test_a_text_is_short_however_large_or_deep_the_value_is() -> None:
    itself: list[Any] = []
    itself.append(itself)
    deep: list[Any] = []
    for _ in range(10**5):
        deep = [deep]
    wide = [["x" * 10**4] * 10**5] * 10**5
    counts = collections.Counter(range(10**5))
    values = [
        itself,
        deep,
        wide,
        counts,
        set(range(10**6)),
        "x" * 10**8,
        b"x" * 10**8,
        Endless(),
        Couple(wide, wide),
        range(10**90),
    ]
    start = perf_counter()
    texts = [shown(value) for value in values]
    assert perf_counter() - start < 0.5
    assert max(map(len, texts)) <= MOST
    assert shown(itself) == "[[[[...]]]]"
    assert shown(list(range(1000))) == "[0, 1, 2, 3, 4, 5, 6, 7, ...]"
    assert shown("a" * 100 + "b" * 100) == f"'{'a' * 40}'...'{'b' * 40}'"
    assert shown(10**400) == f"1{'0' * 39}...{'0' * 40}"


def test_a_class_has_its_article() -> None:
    assert [type_text(value) for value in (3, "a", open, OSError())] == [
        "an int",
        "a str",
        "a builtin_function_or_method",
        "an OSError",
    ]
