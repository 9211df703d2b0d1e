"""Docstrings are in plain English: they begin with a verb, and numbers have units."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from source import classes, functions, paths, tree_of, where

import pipecompile

QUESTION = re.compile(r"^(What|Whose|Whom|Who|Where|When|How|Which|Why|Is|Are|Do|Does|Did|Has|Have|Can|Should)\b")

UNITS = (
    "second", "byte", "sample", "micro-batch", "stage", "device", "node", "piece", "time", "unit", "FLOP", "rank", "micro-batches",
    "point", "pixel", "number of", "share", "fraction", "relative", "ratio", "seed", "index", "batch dimension", "recordings", "copies",
)  # fmt: skip
"""Words that say what a number counts."""


def documented() -> Iterator[tuple[str, str]]:
    """Yield the place and the docstring of every module, class and function."""
    for path in paths():
        if text := ast.get_docstring(tree_of(path)):
            yield where(path, 1), text
        for node in (*functions(path), *classes(path)):
            if text := ast.get_docstring(node):
                yield f"{where(path, node.lineno)} {node.name}", text


def test_no_docstring_is_a_question() -> None:
    lines = [f"{place}: {text.splitlines()[0]}" for place, text in documented() if QUESTION.match(text)]
    assert not lines, f"{len(lines)} docstrings begin with a question word:\n" + "\n".join(lines)


def test_no_docstring_speaks_of_nobody() -> None:
    riddle = re.compile(r"\b(nobody|everybody|somebody|whoever)\b", re.IGNORECASE)
    lines = [f"{place}: {match[0]}" for place, text in documented() if (match := riddle.search(text))]
    assert not lines, "\n".join(lines)


def test_no_docstring_says_what_something_is_not() -> None:
    riddle = re.compile(r"\bwhat is no\b")
    lines = [f"{place}: {match[0]}" for place, text in documented() if (match := riddle.search(text))]
    assert not lines, "\n".join(lines)


NUMBER = re.compile(r"\b(int|float)\b")


def public_functions() -> list[tuple[str, Callable[..., Any]]]:
    """Return the functions of the public surface and the public methods of its classes."""
    found: list[tuple[str, Callable[..., Any]]] = []
    for name in pipecompile.__all__:
        thing = getattr(pipecompile, name)
        if inspect.isfunction(thing):
            found.append((name, thing))
        elif inspect.isclass(thing):
            members = inspect.getmembers(thing, inspect.isfunction)
            ours = [
                (f"{name}.{n}", f)
                for n, f in members
                if f.__module__.startswith("pipecompile") and not n.startswith("_")
            ]
            found += ours
    return found


@pytest.mark.parametrize(
    ("name", "function"), public_functions(), ids=lambda value: value if isinstance(value, str) else ""
)
def test_numeric_parameters_of_public_functions_have_units(name: str, function: Callable[..., Any]) -> None:
    text = inspect.getdoc(function) or ""
    missing = [
        p for p in inspect.signature(function).parameters.values() if is_number(p) and not has_unit(p.name, text)
    ]
    assert not missing, f"{name}: the documentation of {[p.name for p in missing]} names no unit of {UNITS}"


def is_number(parameter: inspect.Parameter) -> bool:
    return NUMBER.search(str(parameter.annotation)) is not None


def has_unit(name: str, text: str) -> bool:
    """A name with its unit in it needs no more: n_stages, seconds_per_byte."""
    if any(unit.replace("-", "") in name for unit in ("stage", "microbatch", "device", "seconds", "bytes")):
        return True
    sentences = [
        part for part in re.split(r"(?<=[.;])\s|\n\s*[-*]|\n\n", text) if re.search(rf"\b{re.escape(name)}\b", part)
    ]
    return any(unit in sentence for sentence in sentences for unit in UNITS)
