"""Values as Python expressions, and fields of a line."""

from __future__ import annotations

import ast
import math

import pytest
import sympy
import torch
from torch import fx

from pipecompile.tracing.value_text import ValuePrinter, expression_text, field, quoted

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (3, "3"),
        (True, "True"),
        (-math.inf, "-inf"),
        (2 + 1j, "(2+1j)"),
        ("a|b", "'a\\x7cb'"),
        (None, "None"),
        (..., "..."),
        ((1,), "(1,)"),
        ([1, (2, "x")], "[1, (2, 'x')]"),
        ({"a": slice(None, 3)}, "{'a': slice(None, 3, None)}"),
        (torch.float16, "torch.float16"),
        (torch.device("cuda:1"), "device('cuda:1')"),
        (torch.channels_last, "torch.channels_last"),
        (torch.zeros(2, 3), "float32[2, 3]"),
        (torch.zeros((), dtype=torch.int64), "int64[()]"),
        (torch.zeros(2, device="meta"), "float32[2].on('meta')"),
        (math.floor, "named('math.floor')"),
        (fx.Graph(), "named('torch.fx.graph.Graph')"),
    ],
)
def test_values(value: object, text: str) -> None:
    assert ValuePrinter(CPU).text(value) == text
    ast.parse(text, mode="eval")


def test_a_gradient_is_printed_on_request() -> None:
    tensor = torch.zeros(2, requires_grad=True)
    assert ValuePrinter(CPU).tensor(tensor, grad=True) == "float32[2].grad"
    assert ValuePrinter(CPU).tensor(tensor) == "float32[2]"


def test_and_and_or_are_functions() -> None:
    n = sympy.Symbol("n", integer=True, positive=True)
    assert "|" not in expression_text(sympy.Or(n > 3, sympy.Eq(n, 1)))
    assert expression_text(sympy.And(n > 3, n < 9)).startswith("And(")


@pytest.mark.parametrize("text", ["net.py:7 in f", "a|b", "", " x", "it's", "a\\b", "a\nb"])
def test_a_field_has_no_separator_and_reads_back(text: str) -> None:
    written = field(text)
    assert "|" not in written
    assert "\n" not in written
    assert (ast.literal_eval(written) if written[0] in "'\"" else written) == text


def test_quoted_keeps_backslashes_before_a_bar() -> None:
    assert ast.literal_eval(quoted("\\|")) == "\\|"
