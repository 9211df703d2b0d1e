"""Values that a recording takes for the same, and those that it does not."""

from __future__ import annotations

import datetime
from enum import Enum
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pipecompile.tracing.guards.strict_equality import is_same


class Kind(Enum):
    A = 1


class Thing:
    def method(self) -> None: ...


THING = Thing()
TENSOR = torch.ones(1)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (int("1000"), int("1000")), (0.1 + 0.2, 0.30000000000000004), (float("nan"), float("nan")), ("a" * 9, "a" * 9), ((1, (2.5,)), (1, (2.5,))),
        (torch.float32, torch.float32), (torch.Size([2]), torch.Size([2])), (torch.device("cpu"), torch.device("cpu")), (Kind.A, Kind.A),
        (Path("a"), Path("a")), (Fraction(1, 3), Fraction(1, 3)), (datetime.date(2020, 1, 1), datetime.date(2020, 1, 1)),
        (np.float32(0.5), np.float32(0.5)), (THING.method, THING.method), (TENSOR, TENSOR), (frozenset("ab"), frozenset("ba")),
    ],
)  # fmt: skip
def test_the_same(a: Any, b: Any) -> None:
    assert is_same(a, b)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (1, 1.0), (1, True), (0.0, -0.0), ((1,), (1.0,)), (1.0, torch.ones(1)), (TENSOR, torch.ones(1)), (torch.ones(1), 1.0), ([1], [1]),
        (THING, Thing()), (THING.method, Thing().method), (lambda: 1, lambda: 1), (np.ones(1), np.ones(1)), (np.float32(1), np.float64(1)),
        (None, 0), ("", None), (torch.float32, torch.float64), (torch.Size([2]), (2,)),
    ],
)  # fmt: skip
def test_not_the_same(a: Any, b: Any) -> None:
    assert not is_same(a, b)
