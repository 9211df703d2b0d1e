"""The sample of a test's cases: which cases run without `--full`."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["numbered", "sample"]


def sample(cases: Sequence[Mapping[str, int]], one_of: int) -> list[int]:
    """Return the numbers of one of `one_of` cases, spread over all. A case is the index of each parameter's value. The next case is one
    whose values were taken the least often so far: each value is in the sample if the sample has as many cases as the parameter values.
    """
    spread = [number for first in range(one_of) for number in range(first, len(cases), one_of)]
    taken, times = list[int](), Counter[tuple[str, int]]()

    def rarity(number: int) -> list[int]:
        return sorted(times[value] for value in cases[number].items())

    while len(taken) * one_of < len(cases):
        number = min(spread, key=rarity)
        spread.remove(number)
        times.update(cases[number].items())
        taken.append(number)
    return taken


def numbered(cases: Sequence[Mapping[str, Any]]) -> list[dict[str, int]]:
    """Return cases with numbers in place of values: one number for the same object. pytest 9 itself numbers cases, not values."""
    numbers: defaultdict[str, dict[int, int]] = defaultdict(dict)
    return [
        {name: numbers[name].setdefault(id(value), len(numbers[name])) for name, value in case.items()}
        for case in cases
    ]
