"""Names that statements read first, assign, and assign on every way."""

from __future__ import annotations

import ast

import pytest

from pipecompile.tracing.outlining.name_flow import NameFlow

CASES = [
    ("y = f(x)", "f x", "y", "y"),
    ("y = x\nz = y", "x", "y z", "y z"),
    ("y += x", "x y", "y", "y"),
    ("y: int = x", "x", "y", "y"),
    ("y: int", "", "", ""),
    ("if a: y = 1\nelse: y = 2\nz = y", "a", "y z", "y z"),
    ("if a: y = 1\nz = y", "a y", "y z", "z"),
    ("for i in x:\n y = i\nz = y", "x y", "i y z", "z"),
    ("while (n := f(x)) > 0: y = n", "f x", "n y", "n"),
    ("try: y = f()\nexcept E as e: y = e\nfinally: z = 1", "f E", "y e z", "z"),
    ("with f() as g: y = g", "f", "g y", "g y"),
    ("y = [i * k for i in x if i]", "x k", "y", "y"),
    ("y = {i: j for i, j in x}", "x", "y", "y"),
    ("y = lambda a, b=c: a + b + d", "c d", "y", "y"),
    ("def g(a):\n return a + b", "b", "g", "g"),
    ("class A(B):\n x = c", "B c", "A", "A"),
    ("x[i].k = y", "x i y", "", ""),
    ("(a, *b), c = x", "x", "a b c", "a b c"),
    ("y = a and (b := 1) or b", "a b", "b y", "y"),
    ("y = p if q else r", "p q r", "y", "y"),
    ("import a.b, c as d\nfrom e import f", "", "a d f", "a d f"),
    ("match x:\n case [a, *b]: y = a\n case {'k': k, **r}: pass\n case _: y = 1", "x", "a b k y", ""),
]


@pytest.mark.parametrize(("text", "read", "assigned", "certain"), CASES)
def test_names_of_statements(text: str, read: str, assigned: str, certain: str) -> None:
    flow = NameFlow(ast.parse(text).body)
    assert flow.first_read == set(read.split())
    assert flow.assigned >= set(assigned.split())
    assert flow.certain == set(certain.split())
