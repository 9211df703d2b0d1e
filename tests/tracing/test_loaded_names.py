"""The names that the code of a function loads, and the modules that it imports."""

from __future__ import annotations

import os
import sys
from types import ModuleType
from typing import Any

import torch

from pipecompile.tracing.loaded_names import (
    bound_attributes,
    bound_globals,
    imported_modules,
    loaded_globals,
    may_write_tensors,
    names_in,
)

SCALE = 2.0


def reads(x: Any) -> Any:
    return [SCALE * item.step for item in x] + [len(x)]


def test_globals_are_named_and_attributes_are_not() -> None:
    assert loaded_globals(reads.__code__) == {"SCALE", "len"}


def test_functions_inside_a_function_count() -> None:
    def outer() -> Any:
        def inner() -> float:
            return SCALE

        return inner

    assert "SCALE" in loaded_globals(outer.__code__)


def test_an_index_of_two_bytes_is_read() -> None:
    names = [f"name_{i}" for i in range(400)]
    scope: dict[str, Any] = {}
    exec("def f():\n" + "".join(f"    {name}\n" for name in names), scope)
    assert loaded_globals(scope["f"].__code__) == set(names)


def test_names_have_attributes_too() -> None:
    assert names_in(reads.__code__) == {"SCALE", "len", "step"}


def imports() -> Any:
    import os.path as p  # the subject
    from collections import abc  # the subject

    def inner() -> Any:
        import sys as s  # the subject

        return s

    return p, abc, inner


def test_modules_that_a_function_imports_are_found_with_the_packages_around_them() -> None:
    assert [module.__name__ for module in imported_modules(imports)] == ["collections", "os", os.path.__name__, "sys"]


def test_a_module_that_is_not_loaded_is_left_out() -> None:
    scope: dict[str, Any] = {}
    exec("def f():\n    import there_is_no_such_module\n", scope)
    assert imported_modules(scope["f"]) == []


def test_a_relative_import_is_of_the_package_of_the_function() -> None:
    module = sys.modules["pipecompile_test_package.part"] = ModuleType("pipecompile_test_package.part")
    scope: dict[str, Any] = {"__package__": "pipecompile_test_package"}
    exec("def f():\n    from .part import name\n", scope)
    try:
        assert imported_modules(scope["f"]) == [module]
    finally:
        del sys.modules["pipecompile_test_package.part"]


def test_names_that_code_binds_are_those_of_stores_and_deletions_also_inside() -> None:
    def function(thing: Any) -> Any:
        global BOUND  # noqa: PLW0603
        BOUND = thing.read

        def inner() -> None:
            global GONE  # noqa: PLW0603
            thing.written = 1
            del GONE, thing.removed

        return inner

    assert bound_globals(function.__code__) == {"BOUND", "GONE"}
    assert bound_attributes(function.__code__) == {"written", "removed"}


def test_names_by_which_tensors_are_written() -> None:
    functions = [lambda w: w.mul_(2), lambda w: w.data, lambda w: torch._foreach_mul_([w], 2), lambda w: w.numpy()]
    assert all(may_write_tensors(function.__code__) for function in functions)
    others = [lambda w: w.mul(2), lambda w: w.__add__(1), lambda w: w.datum]
    assert not any(may_write_tensors(function.__code__) for function in others)
