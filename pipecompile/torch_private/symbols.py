"""Symbolic sizes: where a symbol comes from, the functions in its expressions, and their evaluation on other values."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from types import FunctionType, MethodType
from typing import Any

import sympy
from torch._dynamo.source import ConstantSource  # 2.11; names the origin of a symbol
from torch.fx.experimental.symbolic_shapes import ShapeEnv, StrictMinMaxConstraint
from torch.utils._sympy import functions  # 2.11
from torch.utils._sympy.functions import (  # 2.11; divisions as Python has them
    FloatTrueDiv,
    FloorDiv,
    IntTrueDiv,
    ToFloat,
)
from torch.utils._sympy.interp import sympy_interp  # 2.11; evaluates an expression by the functions of an analysis
from torch.utils._sympy.numbers import int_oo  # 2.11; a whole number without limit
from torch.utils._sympy.reference import PythonReferenceAnalysis  # 2.11; Python's own operators as an analysis
from torch.utils._sympy.value_ranges import ValueRanges  # 2.11; the values that a symbol may have

__all__ = [
    "ConstantSource",
    "FloatTrueDiv",
    "FloorDiv",
    "IntTrueDiv",
    "PythonReferenceAnalysis",
    "ToFloat",
    "any_number_of_rows",
    "function_named",
    "own_caches",
    "sympy_interp",
]


def any_number_of_rows() -> StrictMinMaxConstraint:
    """Return the constraint on a size that it is 0 or more. A symbol without one is taken for more than 0."""
    return StrictMinMaxConstraint(warn_only=False, vr=ValueRanges(0, int_oo))


def function_named(name: str) -> Any:
    """Return torch's function in expressions of sizes, such as `FloorDiv` or `Mod`; None for a name without one. 2.11."""
    found = getattr(functions, name, None)
    return found if isinstance(found, type) and issubclass(found, sympy.Basic) else None


def own_caches(env: ShapeEnv) -> None:
    """Let an analysis of sizes cache its results itself. Torch caches them on the class, with the analysis in every key, so that one of a
    recording lived as long as the process. 2.11.
    """
    for name, method in vars(ShapeEnv).items():
        if hasattr(method, "cache_clear"):
            setattr(env, name, _own_cache(env, method))


def _own_cache(env: ShapeEnv, method: Any) -> Callable[..., Any]:
    """Return a method that caches until the analysis learns something new, as torch's do, or for ever."""
    cached = lru_cache(None)(MethodType(method.__wrapped__, env))
    if not isinstance(method, FunctionType):
        return cached
    version = env._version_counter

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal version
        if version != env._version_counter:
            cached.cache_clear()
            version = env._version_counter
        return cached(*args, **kwargs)

    call.cache_clear, call.cache_info = cached.cache_clear, cached.cache_info  # type: ignore[attr-defined]
    return call
