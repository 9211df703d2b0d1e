"""Functions with outlined blocks compute what they computed, with the same lines, closures and private names."""

from __future__ import annotations

import traceback

import pytest

from pipecompile.tracing.outlining.code_blocks import blocks_around
from pipecompile.tracing.outlining.outlined_code import original_code, outlined_code

FACTOR = 3


def closed(offset):
    class Model:
        __scale = 2

        def forward(self, x, *rest, bias=1, **more):
            made = []
            for item in rest:
                if item > x:
                    x = x * self.__scale + offset + FACTOR
                    continue
                try:
                    made.append(10 / item)
                except ZeroDivisionError as error:
                    made.append(str(error))
            x += 1
            y = [x + value for value in rest]
            if bias:
                return x, made, sum(y), more
            return None

        def fails(self, x):
            y = x + 1
            z = y / 0
            return z + y

    return Model


def direct(block, scope):
    names = block.__code__.co_varnames[: block.__code__.co_argcount]
    return block(*(scope.get(name) for name in names))


Model = closed(5)
FIRST = Model.forward.__code__.co_firstlineno


@pytest.mark.parametrize("line", range(FIRST + 1, FIRST + 16))
def test_a_function_computes_the_same_with_any_block_outlined(line: int) -> None:
    code, calls = Model.forward.__code__, []

    def route(block, scope):
        calls.append(block.__code__.co_qualname)
        return direct(block, scope)

    arguments = [(1, 5, 0, 2), (7, 1), (2,)]
    expected = [Model().forward(*each, key=1) for each in arguments]
    for place in blocks_around(code, line):
        new = outlined_code(code, {place: route})
        assert original_code(new) is code
        Model.forward.__code__ = new
        try:
            assert [Model().forward(*each, key=1) for each in arguments] == expected
        finally:
            Model.forward.__code__ = code
    assert set(calls) <= {code.co_qualname}


@pytest.mark.parametrize("is_reversed", [False, True])
def test_blocks_of_one_body_are_outlined_together(is_reversed: bool) -> None:
    """The second one had the place that it had before the first one became several statements."""

    def forward(x, y):
        if x > 1:
            x = x + 10
        if y > 1:
            y = y * x
        if x > y:
            x = x - y
        return x, y

    code, calls = forward.__code__, []
    lines = [code.co_firstlineno + line for line in (1, 3, 5)]
    places = [next(place for place in blocks_around(code, line) if place.begin[0] == line) for line in lines]
    routes = {
        place: lambda block, scope, line=place.begin[0]: calls.append(line) or direct(block, scope) for place in places
    }
    cases = [(0, 0), (5, 0), (0, 5), (5, 5)]
    expected = [forward(*case) for case in cases]
    forward.__code__ = outlined_code(code, dict(reversed(routes.items())) if is_reversed else routes)
    assert [forward(*case) for case in cases] == expected
    assert calls == lines * len(cases)


def test_of_two_blocks_the_outer_one_is_outlined() -> None:
    code, calls = Model.forward.__code__, []
    inner, *_, outer = [place for place in blocks_around(code, FIRST + 7) if place.end[0] < FIRST + 12]

    def route(name):
        return lambda block, scope: calls.append(name) or direct(block, scope)

    Model.forward.__code__ = outlined_code(code, {inner: route("inner"), outer: route("outer")})
    try:
        Model().forward(1, 5)
    finally:
        Model.forward.__code__ = code
    assert set(calls) == {"outer"}


def test_tracebacks_show_the_lines_of_the_user() -> None:
    code = Model.fails.__code__
    place = next(iter(blocks_around(code, code.co_firstlineno + 2)))
    Model.fails.__code__ = outlined_code(code, {place: direct})
    try:
        with pytest.raises(ZeroDivisionError) as caught:
            Model().fails(1)
    finally:
        Model.fails.__code__ = code
    last = traceback.extract_tb(caught.value.__traceback__)[-1]
    assert (last.filename, last.lineno, last.line) == (__file__, code.co_firstlineno + 2, "z = y / 0")
