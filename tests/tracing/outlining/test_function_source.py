"""Functions are found in their files, and only those that can be outlined."""

from __future__ import annotations

import functools

from pipecompile.tracing.outlining.function_source import source_of


def decorate(function):
    @functools.wraps(function)
    def wrapper(*args):
        return function(*args)

    return wrapper


class Model:
    @decorate
    def forward(self, x):
        return x

    def rows(self, x):
        yield x

    def counts(self):
        global COUNT  # noqa: PLW0603
        COUNT = 1


def test_a_decorated_method_is_found_with_its_class() -> None:
    source = source_of(Model.forward.__wrapped__.__code__)
    assert (source.node.name, source.class_name) == ("forward", "Model")


def test_generators_globals_and_code_without_a_file_have_none() -> None:
    scope = {}
    exec("def made(x): return x", scope)
    for function in (Model.rows, Model.counts, lambda x: x, scope["made"]):
        assert source_of(function.__code__) is None
