"""Stand-ins for numbers that change between steps: their arithmetic is Python's, and what needs the number fails."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

from pipecompile.tracing.fakes.lifted_numbers import (
    LiftedFloat,
    LiftedInt,
    LiftedNumber,
    NotLiftedError,
    examples,
    lifted,
    lifted_in,
)

NUMBERS: dict[str, Any] = {}


def lifted_root(label: str) -> Any:
    return NUMBERS[label]


lifted_root.__name__ = "lifted"


def number(label: str, value: Any) -> Any:
    NUMBERS[label] = value
    return (LiftedFloat if isinstance(value, float) else LiftedInt)(lifted_root, (label,), value, {})


ARITHMETIC: list[Callable[[Any], Any]] = [
    lambda t: t + 1, lambda t: 1 - t, lambda t: 2 * t * 0.1 * 0.3, lambda t: 1 / t, lambda t: t // 0.1, lambda t: 7 % t, lambda t: 2**t, lambda t: t**2,
    lambda t: -t, lambda t: abs(-t), lambda t: round(t, 1), lambda t: math.floor(t) + math.ceil(t) + math.trunc(t), lambda t: divmod(t, 0.2)[1], lambda t: divmod(2, t)[0],
]  # fmt: skip


@pytest.mark.parametrize("index", range(len(ARITHMETIC)))
def test_arithmetic_is_computed_anew_and_equals_python(index: int) -> None:
    result = ARITHMETIC[index](number("t", 0.7))
    assert (type(result.number), result.number) == (type(ARITHMETIC[index](0.7)), ARITHMETIC[index](0.7))
    NUMBERS["t"] = 1.9
    assert result.now() == ARITHMETIC[index](1.9)
    graph = fx.Graph()
    graph.output(result.graph_node(graph, {}))
    assert fx.GraphModule(torch.nn.Module(), graph)() == ARITHMETIC[index](1.9)


def test_a_comparison_is_answered_and_noted_once() -> None:
    step = number("step", 3)
    assert [step > 10, step > 10, step / 2 < 2, step != 4, bool(step)] == [False, False, True, True, True]
    noted = step.comparisons
    assert list(noted) == ["step > 10", "(step / 2) < 2", "step != 4", "step != 0"]
    assert all(one.holds() for one in noted.values())
    NUMBERS["step"] = 11
    assert [one.holds() for one in noted.values()] == [False, False, True, True]


@pytest.mark.parametrize("use", [float, int, hash, range, str, repr, "{:.1f}".format, math.exp, complex, lambda n: [0, 1, 2][n], lambda n: {3: 1}[n]])  # fmt: skip
def test_what_needs_the_number_fails(use: Callable[[Any], Any]) -> None:
    with pytest.raises(NotLiftedError, match="n changes between steps"):
        use(number("n", 3))


def test_the_parts_of_an_expression_are_named() -> None:
    result = lifted(max, number("a", 1.0) * 2, number("b", 3))
    assert result.labels == {"a", "b"}
    assert result.text == "max((a * 2), b)"
    with pytest.raises(NotLiftedError, match="str makes a str of it"):
        lifted(str, number("a", 1.0))


def test_nested_arguments_become_numbers() -> None:
    n = number("n", 3)
    assert examples((1, [n, {"a": n}], slice(None, n))) == (1, [3, {"a": 3}], slice(None, 3))
    assert [id(one) for one in lifted_in((1, [n], slice(n)))] == [id(n), id(n)]
    plain = ([1, 2], {"a": 1})
    assert examples(plain) is plain
    assert isinstance(n, LiftedNumber)


def test_a_message_shows_the_number(capsys: pytest.CaptureFixture[str]) -> None:
    n = number("n", 3)
    print(f"{n}")
    assert capsys.readouterr().out == "3\n"
