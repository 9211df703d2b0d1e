"""The sample of a test's cases has as many as asked for, and each value of a parameter as often as any other."""

from __future__ import annotations

from collections import Counter
from itertools import product

import pytest
from sampling import numbered, sample


@pytest.mark.parametrize("sizes", [(3, 6), (6, 3), (4, 2, 4), (2, 2, 8), (9,), (1, 7)])
@pytest.mark.parametrize("one_of", [2, 3, 4])
def test_a_sample_has_each_value_as_often_as_any_other(sizes, one_of):
    cases = [dict(zip("abc", values, strict=False)) for values in product(*map(range, sizes))]
    taken = sample(cases, one_of)
    assert len(taken) == len(set(taken)) == -(-len(cases) // one_of)
    for name, size in zip("abc", sizes, strict=False):
        times = Counter(cases[number][name] for number in taken)
        assert len(times) == min(size, len(taken))
        assert max(times.values()) - min(times.values()) <= 1


def test_a_sample_of_one_parameter_is_spread_over_its_values():
    assert sample([{"a": a} for a in range(10)], 4) == [0, 4, 8]


def test_the_same_object_has_the_same_number():
    first, second = [1], [1]
    cases = [{"a": first, "b": True}, {"a": second, "b": True}, {"a": first, "b": False}]
    assert numbered(cases) == [{"a": 0, "b": 0}, {"a": 1, "b": 0}, {"a": 0, "b": 1}]
