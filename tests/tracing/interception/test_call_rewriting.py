from __future__ import annotations

import pytest

from pipecompile.tracing.interception.call_rewriting import builtin_calls_redirected


def calls(x):
    inner = lambda: float(2)  # noqa: E731
    return int(x), [int(y) for y in [1.5]], inner()


def mentions(x):
    return type(x) is float, isinstance(x, float), list(map(int, [1.5])), {int: 1}[int]


SUBSTITUTES = {"int": lambda x: ("int", x), "float": lambda x: ("float", x), "type": lambda x: float}


def test_calls_are_led_elsewhere_and_nothing_else_is():
    with builtin_calls_redirected(SUBSTITUTES, [calls, mentions]):
        assert calls(2.5) == (("int", 2.5), [("int", 1.5)], ("float", 2))
        assert mentions(2.5) == (True, True, [1], 1)
        assert int(2.5) == 2, "this function was not named"
    assert calls(2.5) == (2, [1], 2.0)


def test_the_functions_are_put_back_after_a_failure():
    code = calls.__code__
    with pytest.raises(ZeroDivisionError), builtin_calls_redirected({"int": lambda x: 1 / 0}, [calls]):
        calls(1)
    assert calls.__code__ is code


def test_a_function_with_too_many_names_is_left_alone():
    names = " + ".join(f"name_{i}" for i in range(200))
    space = {f"name_{i}": i for i in range(200)}
    exec(f"def many(x): return {names} + int(x)", space)
    with builtin_calls_redirected(SUBSTITUTES, [space["many"]]):
        assert space["many"](1.5) == sum(range(200)) + 1
