"""Messages in the user's code: whether an expression only makes a text to read, so that its value decides nothing."""

from __future__ import annotations

import ast
import linecache
from functools import lru_cache
from itertools import islice
from types import FrameType

__all__ = ["is_in_message"]

_MESSAGE_CALLS = frozenset(
    "_assert _check _check_value _check_is_size print warn warn_once warning warning_once info info_once debug error "
    "exception critical log".split()
)
"""Names of functions and methods whose arguments are messages."""

_Position = tuple[int, int]
"""Line from 1, column from 0."""


def is_in_message(frame: FrameType) -> bool:
    """Return whether the expression that `frame` is evaluating is part of a message."""
    line, end_line, column, end_column = next(islice(frame.f_code.co_positions(), frame.f_lasti // 2, None))
    if line is None or end_line is None or column is None or end_column is None:
        return False
    return any(
        start <= (line, column) and (end_line, end_column) <= end for start, end in _messages(frame.f_code.co_filename)
    )


@lru_cache(maxsize=64)
def _messages(file: str) -> tuple[tuple[_Position, _Position], ...]:
    """Return start and end of every message in a file."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:
        return ()
    return tuple(_span(part) for node in ast.walk(tree) for part in _message_parts(node))


def _message_parts(node: ast.AST) -> list[ast.expr]:
    if isinstance(node, ast.Raise):
        return [node.exc] if node.exc else []
    if isinstance(node, ast.Assert):
        return [node.msg] if node.msg else []
    if isinstance(node, ast.Call) and _name(node.func) in _MESSAGE_CALLS:
        return [*node.args, *(keyword.value for keyword in node.keywords)]
    return []


def _name(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _span(node: ast.expr) -> tuple[_Position, _Position]:
    return (node.lineno, node.col_offset), (node.end_lineno or node.lineno, node.end_col_offset or 0)
