"""The globals that code loads, apart from the attributes that it names."""

from __future__ import annotations

from typing import Any

from pipecompile.tracing.guards.code_names import loaded_globals

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
