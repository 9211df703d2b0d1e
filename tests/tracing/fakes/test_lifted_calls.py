"""A number that changes between steps enters values, and no shape."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from pipecompile.tracing.fakes.lifted_calls import check_shapes
from pipecompile.tracing.fakes.lifted_numbers import LiftedFloat, LiftedInt, NotLiftedError, examples

X = torch.ones(2, 3)


def check(function: Callable[..., Any], *args: Any) -> None:
    check_shapes(function, (args, {}), function(*examples(args)))


def number(value: Any) -> Any:
    def lifted(_label: str) -> Any:
        return value

    return (LiftedFloat if isinstance(value, float) else LiftedInt)(lifted, ("n",), value, {})


@pytest.mark.parametrize(
    ("function", "value"), [(torch.mul, 0.5), (torch.mul, 2), (F.dropout, 0.3), (torch.Tensor.__getitem__, None)]
)
def test_values_may_depend_on_the_number(function: Callable[..., Any], value: Any) -> None:
    check(function, X, 0 if value is None else number(value))


@pytest.mark.parametrize(
    ("function", "args", "why"),
    [
        (torch.narrow, (X, 1, 0, number(2)), "narrow takes it as a constant"),
        (torch.softmax, (X, number(1)), "softmax takes it as a constant"),
        (F.interpolate, (X[None], None, number(2.0)), "the shape of interpolate's result depends on it"),
        (torch.arange, (number(4.0),), "the shape of arange's result depends on it"),
    ],
)
def test_shapes_and_dimensions_may_not(function: Callable[..., Any], args: Any, why: str) -> None:
    with pytest.raises(NotLiftedError, match=why):
        check(function, *args)
