"""Values of every kind that a user may pass for any argument by mistake, and those that Python itself fails to write or compare."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from torch import nn

__all__ = ["VALUES", "Mute", "Odd"]


class Odd:
    """An object that is nothing in particular."""


class Mute:
    """An object that nothing can be asked of: it has no text, no truth, and is equal to nothing."""

    def __repr__(self) -> str:
        raise RuntimeError

    def __bool__(self) -> bool:
        raise RuntimeError

    def __eq__(self, other: object) -> bool:
        raise RuntimeError

    __hash__ = object.__hash__


LONG = 10**5000
"""A number that Python does not write."""

ITSELF: list[Any] = []
ITSELF.append(ITSELF)

VALUES = [
    None, True, -1, 0, 3, 1.5, -0.0, math.nan, math.inf, -math.inf, 10**9, -(10**30), 10**400, LONG, -LONG, 1j,
    5e-324, 1e308, 10**18, Fraction(1, 3), np.int64(3), np.float32(3), [5e-324, 1.0], {"0": 1e308},
    "", "nonsense", "1F1B", "16GiB", "auto", "a\0b", "\ud800", "x" * 10**5, "\ud800.csv", f"{'x' * 300}.txt", f"{'x/' * 3000}x.json", b"x",
    Mute(), Odd(), Odd, len, range(2), {1, 2}, [], [None], ["x"], [0, 2], [LONG], (LONG,), ITSELF, [Mute()],
    {}, {"x": 1}, {"x": None}, {"x": LONG}, {"x": Mute()}, {0: 0}, {LONG: 1}, ({},),
    np.array(["x", "y"]), torch.zeros(2), torch.zeros(()), torch.float32, torch.device("cpu"), torch.device("meta"), nn.Linear, nn.Linear(2, 2),
]  # fmt: skip
