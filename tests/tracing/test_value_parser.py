"""Values read from their text."""

from __future__ import annotations

import math

import pytest
import torch

from pipecompile.errors import InputError
from pipecompile.tracing.qualified_names import Named
from pipecompile.tracing.value_parser import ValueReader, literal
from pipecompile.tracing.value_text import ValuePrinter, expression_text

CPU = torch.device("cpu")


def reader() -> ValueReader:
    return ValueReader(CPU, {"n": 4})


@pytest.mark.parametrize(
    "text",
    [
        "3", "-2.5", "-inf", "(2+1j)", "'a'", "b'x'", "None", "...", "(1,)", "[1, (2, 'x')]", "{'a': slice(None, 3, None)}",
        "torch.float16", "torch.channels_last", "device('cuda:1')", "named('my.Class')", "float32[2, 3]", "int64[()]",
        "float32[n, 2*n + 1]", "float32[2].on('meta')", "n + 1", "(n//2)", "Mod(n, 3)", "float(n/2)", "bool(n > 3)",
    ],
)  # fmt: skip
def test_a_value_prints_as_it_was_read(text: str) -> None:
    assert ValuePrinter(CPU).text(reader().read(literal(text))) == text


def test_a_size_has_the_example_as_its_hint() -> None:
    tensor = reader().read(literal("float32[2*n + 1, 3]"))
    assert tensor.shape[0].node.hint == 9
    assert not tensor.requires_grad


def test_an_attribute_that_requires_a_gradient() -> None:
    assert reader().read(literal("float32[2].grad")).requires_grad


def test_names_are_nodes_in_arguments_and_symbols_in_values() -> None:
    node = object()
    assert reader().read(literal("[x, nan]"), {"x": node})[0] is node
    assert math.isnan(reader().read(literal("nan")))
    with pytest.raises(InputError, match="'y' is not a node"):
        reader().read(literal("y"), {"x": node})


def test_conditions_are_expressions() -> None:
    one = reader()
    for text in ("Eq(n, 4)", "n > 3", "And(n > 3, n < 9)", "Ne(Mod(n, 2), 0)"):
        assert expression_text(one.expression(literal(text))) == text


@pytest.mark.parametrize(
    "text",
    [
        "f(",
        "x.y.z",
        "torch.nn",
        "__import__('os')",
        "exec('1')",
        "float33[2]",
        "lambda: 1",
        "open('f')",
        "Symbol('x')[0]",
    ],
)
def test_what_is_no_value_is_refused_and_nothing_runs(text: str) -> None:
    with pytest.raises(InputError):
        reader().read(literal(text))


def test_a_stand_in_keeps_the_name() -> None:
    assert reader().read(literal("named('my.Class')")) == Named("my.Class")
