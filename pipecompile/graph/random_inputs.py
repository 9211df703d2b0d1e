"""Random inputs of experiments: values of many kinds, so that no call takes all of them alike."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

__all__ = ["has_special", "random_values"]


def has_special(trial: int) -> bool:
    """Return whether a trial draws the special numbers among integers, and NaN among real numbers if it is special."""
    return trial // 2 % 2 == 0


def random_values(shape: Sequence[int], dtype: torch.dtype, trial: int, special: Sequence[float]) -> torch.Tensor:
    """Return random values. Trials differ in kind: fractions, normal or sparse numbers, numbers near the `special` ones; few or
    many true values; integers 0 and 1, or the `special` ones as well, or, for calls that take lengths, 1 and 2. True values, special integers and NaN become more frequent
    along a value, so that the parts of a batch hardly ever have the same share of them.
    """
    with torch.device("cpu"):  # not the default device of a script
        return _random_values(shape, dtype, trial, special)


def _random_values(shape: Sequence[int], dtype: torch.dtype, trial: int, special: Sequence[float]) -> torch.Tensor:
    if dtype is torch.bool:
        return torch.rand(shape) < (_rising(shape), 0.05, 0.95)[trial % 3]
    if dtype.is_floating_point or dtype.is_complex:
        numbers = _random_numbers(shape, trial, [one for one in special if not math.isnan(one)])
        if has_special(trial) and any(map(math.isnan, special)):
            numbers[torch.rand(shape) < _rising(shape)] = torch.nan
        return numbers.to(dtype)
    plain = torch.randint(2, tuple(shape)) + (trial % 8 == 7)
    integers = [int(one) for one in special if not math.isnan(one)]
    if not has_special(trial) or not integers:
        return plain.to(dtype)
    choices = torch.tensor(integers)
    chosen = choices[torch.randint(len(choices), tuple(shape))]
    return torch.where(torch.rand(shape) < _rising(shape), chosen, plain).to(dtype)


def _rising(shape: Sequence[int]) -> torch.Tensor:
    """Return probabilities from 0.1 to 0.9 along a value."""
    return torch.linspace(0.1, 0.9, math.prod(shape)).reshape(tuple(shape))


def _random_numbers(shape: Sequence[int], trial: int, special: Sequence[float]) -> torch.Tensor:
    match trial % 4:
        case 0:
            return torch.randn(shape)
        case 1:
            return torch.rand(shape) * 0.8 + 0.1
        case 2:
            centres = torch.tensor([0.0, *special])
            return centres[torch.randint(len(centres), tuple(shape))] + torch.randn(shape)
        case _:
            return torch.randn(shape) * (torch.rand(shape) < 0.1)  # mostly zeros
