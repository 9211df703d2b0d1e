"""Functions in expressions of symbolic sizes."""

from __future__ import annotations

import pytest
import sympy
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from pipecompile.torch_private.symbols import (
    ConstantSource,
    FloatTrueDiv,
    FloorDiv,
    IntTrueDiv,
    PythonReferenceAnalysis,
    ToFloat,
    function_named,
    sympy_interp,
)

pytestmark = pytest.mark.smoke


def test_divisions_are_those_of_python() -> None:
    n = sympy.Symbol("n", integer=True)
    assert FloorDiv(n, 2).subs({n: 7}) == 7 // 2
    assert float(IntTrueDiv(n, 2).subs({n: 7})) == 7 / 2
    assert float(FloatTrueDiv(ToFloat(n), 2.0).subs({n: 7})) == 7 / 2


def test_an_expression_is_evaluated_on_numbers() -> None:
    n = sympy.Symbol("n", integer=True, positive=True)
    assert sympy_interp(PythonReferenceAnalysis, {n: 7}, FloorDiv(n, 2) + 1) == 4


def test_functions_are_found_by_name() -> None:
    assert function_named("FloorDiv") is FloorDiv
    assert function_named("nonsense") is None


def test_a_symbol_has_a_source() -> None:
    env = ShapeEnv()
    symbol = env.create_symbol(5, ConstantSource("batch"), DimDynamic.DYNAMIC, None)
    assert env.create_symintnode(symbol, hint=5) == 5
