"""Files fit on a few screens, functions on one, and signatures on a line or two."""

from __future__ import annotations

import ast

from source import FunctionNode, functions, paths, where

FILE_LINES, FUNCTION_LINES, PARAMETERS = 300, 25, 12

TABLE_LINES = 50
TABLES = {
    ("costs/problem_builder.py", "build_problem"),
    ("partitioners/ilp/solver_backend.py", "_highs"),
}
"""Functions that are a solver's model or a table of numbers: up to TABLE_LINES lines."""

FLAT_SIGNATURES = {("compiling.py", "compile")}
"""Public functions whose keywords stay flat: a user writes each by its name."""


def test_files_are_short() -> None:
    long = [
        f"{where(path, n)}: {n} lines" for path in paths() if (n := len(path.read_text().splitlines())) > FILE_LINES
    ]
    assert not long, "\n".join(long)


def test_functions_are_short() -> None:
    long = []
    for path in paths():
        for node in functions(path):
            limit = TABLE_LINES if key(path, node) in TABLES else FUNCTION_LINES
            if (lines := lines_of(node)) > limit:
                long.append(f"{where(path, node.lineno)}: {node.name} has {lines} lines, at most {limit}")
    assert not long, "\n".join(long)


def test_signatures_are_short() -> None:
    long = []
    for path in paths():
        for node in functions(path):
            count = len((*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs))
            if count > PARAMETERS and key(path, node) not in FLAT_SIGNATURES:
                long.append(f"{where(path, node.lineno)}: {node.name} has {count} parameters, at most {PARAMETERS}")
    assert not long, "\n".join(long)


def key(path: object, node: FunctionNode) -> tuple[str, str]:
    return str(path).split("/pipecompile/")[-1], node.name


def lines_of(node: FunctionNode) -> int:
    """Return the lines of a function without its signature and docstring."""
    body = node.body[1:] if ast.get_docstring(node) is not None else node.body
    return (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0
